"""Holdfast: a durable orchestrator. One import name over the rooms at the top of the tree."""

__version__ = "0.1.0"
