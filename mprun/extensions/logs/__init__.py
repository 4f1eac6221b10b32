"""Logs of other tools: `mprun compare --scalar` reads them."""
