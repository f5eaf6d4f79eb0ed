"""The strategies beside `ddp`, each in a module of one shape; `ray_app.train.build` chooses among them."""
