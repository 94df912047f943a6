"""The door for operators."""
