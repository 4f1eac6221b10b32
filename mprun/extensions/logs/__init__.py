"""Logs of other tools: `mprun compare --tag` reads them."""
