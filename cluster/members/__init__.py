"""Nodes that form, join, lead, hand over and leave."""
