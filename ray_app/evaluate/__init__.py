"""The evaluator: an actor with a life of its own that follows the checkpoints."""
