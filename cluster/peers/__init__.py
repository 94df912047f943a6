"""Calls between nodes, over the links of the log."""
