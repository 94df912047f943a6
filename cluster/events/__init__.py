"""What changes in the cluster, as events for those who watch it."""
