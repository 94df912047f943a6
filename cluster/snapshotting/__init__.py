"""When snapshots of partitions are cut, kept and fetched."""
