"""How the gradients of the logical workers meet; siblings of one shape, joined in `build`."""
