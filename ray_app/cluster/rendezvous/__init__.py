"""The rendezvous actor, which forms generations of workers, and a worker's client of it."""
