"""Fidelity of the CPU emulation: distances between 16-bit results, operation by operation."""
