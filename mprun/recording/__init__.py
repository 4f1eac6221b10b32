"""What a run writes while it trains, one of `mprun` and one of a script alike."""
