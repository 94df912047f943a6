"""Forming a cluster, joining and leaving it, and moving leaderships."""
