"""Everything that can be refused before a run starts: the plan, a dry run on a few rows, checks of the task."""
