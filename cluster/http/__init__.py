"""What both doors of a node have in common."""
