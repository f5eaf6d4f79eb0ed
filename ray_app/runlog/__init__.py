"""The files of a run directory: lease, configuration, journal, steps, evaluations, output."""
