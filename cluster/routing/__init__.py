"""From an id to the leader of its partition, and from its outcome back to the clients that wait."""
