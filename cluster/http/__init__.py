"""Shared by both HTTP listeners of a node."""
