"""Who decides how many workers there are: Ray Train's controller, changed where it would restart all, and what may fail."""
