"""Backups of whole clusters, and restoring them."""
