"""Synthesis, place and route of the core with open tools: yosys and nextpnr, both from PyPI."""
