"""One run: from a checked configuration to a finished run directory, and its continuation."""
