"""What only the leader of a partition does."""
