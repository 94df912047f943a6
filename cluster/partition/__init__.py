"""One partition on one node: the door into its log, its machine and its state."""
