"""Metrics and the watchdog of a node."""
