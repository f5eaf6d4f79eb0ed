"""One reader for each format; each cuts its source into input splits by content."""
