"""Training loops of other tools, one file each, and their common task."""
