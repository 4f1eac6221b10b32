"""Open questions about CUDA kernels, each a function from a device to an `Answer`."""
