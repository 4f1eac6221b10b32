"""One run on several processes: finding, starting and synchronizing its ranks."""
