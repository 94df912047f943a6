"""SQL over the cluster: read-only queries on its invocations, journals, state, timers, nodes and partitions."""
