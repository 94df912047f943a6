"""Values too large for the log: staged in pieces, or kept in a store that all nodes share."""
