"""Runs of a user's own script: `mprun.Run`, `mprun.sweep`, `mprun.probe`, `mprun.explain`."""
