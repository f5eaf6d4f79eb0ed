"""The proof: a run undisturbed and under named disturbances on the user's own cluster, and what came of it."""
