"""The strategies other than `ddp`, each a state and a step in its module; `ray_app.train.build` chooses one."""
