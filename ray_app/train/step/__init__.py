"""One optimizer step: play the logical workers, exchange, update; and the evaluation that workers do between steps."""
