"""The strategies other than `ddp`, each in a module with its training state and, if it needs one, its own step.

`ray_app.train.build` chooses the classes of the configured strategy.
"""
