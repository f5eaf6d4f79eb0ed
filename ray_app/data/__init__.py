"""From plan to tensors: ingest, planned reads as Ray Data tasks, and the feed of a worker."""
