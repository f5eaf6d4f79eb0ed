"""What runs inside a worker, and how workers are started."""
