"""Gradient reduction: how the gradients of the logical workers are summed in a fixed tree, for `ddp` and `fsdp`."""
