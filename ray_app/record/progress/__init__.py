"""What a run writes while it trains: steps, history and journal, in segments."""
