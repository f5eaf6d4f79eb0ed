"""The run directory: where everything is, how small files are written, and the run's own record of what happened."""
