"""What a node tells about itself."""
