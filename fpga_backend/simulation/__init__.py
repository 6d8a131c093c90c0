"""The RTL, simulated cycle by cycle: built by Verilator once, called with ctypes."""
