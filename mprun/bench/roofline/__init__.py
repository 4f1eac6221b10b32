"""FLOPs and bytes of a training step, counted without a GPU, and the time that they take at least."""
