"""The strategy `parameter_server`: servers that hold parts of the state, a coordinator, and workers without generations."""
