"""What training reads: what is in a data set, planned reads to decoded rows, rows to micro-batches. Making data sets is `ingest`."""
