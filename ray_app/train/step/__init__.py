"""One optimizer step: run the assigned logical workers, reduce their gradients, update."""
