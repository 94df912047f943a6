"""The door for clients."""
