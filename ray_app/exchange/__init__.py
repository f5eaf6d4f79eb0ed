"""How the gradients of the logical workers meet in a step, see `Exchange`: `ddp` and `fsdp`, and the fixed tree in which all add."""
