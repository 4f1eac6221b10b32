"""Training loops of other tools, one file each, and the task that all of them are given."""
