"""What runs inside a worker: the loop, the step, the state, the group, what is kept. How workers are started is `cluster`."""
