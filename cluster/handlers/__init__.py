"""Dispatches attempts to users' handlers, and turns their answers into commands."""
