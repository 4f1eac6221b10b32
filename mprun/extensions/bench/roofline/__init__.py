"""FLOPs and bytes of a training step, counted without a GPU, and the least time they take."""
