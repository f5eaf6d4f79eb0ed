"""What outlives a step: the recorder of metrics, the saver of checkpoints, snapshots, and how a state is found again."""
