"""Gradient reduction: sums the gradients of all logical workers, in one fixed tree or in the order of a collective.

`bucketed` reduces for every strategy with a whole model per worker, `sharded` for `fsdp`.
"""
