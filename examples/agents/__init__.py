"""Agents of frameworks on Holdfast: one module for each."""
