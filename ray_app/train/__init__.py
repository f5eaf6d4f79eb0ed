"""The training loop of one worker, with its step, state, process group, checkpoints; `cluster` starts the workers."""
