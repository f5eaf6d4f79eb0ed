"""Ray Train's controller, changed so that single workers are replaced without restarting the others."""
