"""Planned reads to decoded rows, as Ray Data tasks or in this process. Which rows are read is decided by the plan."""
