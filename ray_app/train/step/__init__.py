"""One optimizer step: it runs the assigned logical workers, reduces their gradients and updates the parameters."""
