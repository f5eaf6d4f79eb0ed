"""The strategies that differ from `ddp` in what is kept or in how a step goes, each a sibling of one shape; see `ray_app.train.build`."""
