"""What the core does without: packages that join it by entry points (pyproject.toml)."""
