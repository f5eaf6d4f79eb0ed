"""The data that outlives a step: the step log, checkpoints, snapshots in memory, and restoring from them."""
