"""Studies: many trials of one configuration with other settings, of which the best one is chosen."""
