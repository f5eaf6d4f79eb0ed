"""The evaluator actor, which scores checkpoints while training goes on."""
