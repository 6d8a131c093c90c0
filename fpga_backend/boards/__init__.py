"""The core's identity for the tools of boards, and scripts that build bitstreams. Nothing here has run on a board."""
