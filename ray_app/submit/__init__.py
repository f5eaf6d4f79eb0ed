"""A run as a Ray job: looked at before it takes a slot, submitted, followed, and submitted again when its driver is lost."""
