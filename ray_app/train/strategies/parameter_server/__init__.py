"""The strategy `parameter_server`: servers with parts of the state, a coordinator, and workers without generations."""
