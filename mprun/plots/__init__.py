"""Figures: one look for everything that is drawn."""
