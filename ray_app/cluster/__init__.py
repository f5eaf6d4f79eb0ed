"""All that knows Ray's private parts, and nothing else: the controller that drops and adds single workers, and the rendezvous."""
