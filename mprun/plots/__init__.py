"""Figures in one common style."""
