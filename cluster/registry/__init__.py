"""The meta group: members, deployments and the table of partitions."""
