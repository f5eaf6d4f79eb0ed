"""One training run from its start to its summary, in the process that the user started."""
