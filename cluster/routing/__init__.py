"""Routes commands to the leader of an id's partition, and outcomes back to the clients that wait."""
