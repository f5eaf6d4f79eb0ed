"""What a task by configuration alone is made of: its specifications, its loss, and what of the data its model can take."""
