"""From Parquet row groups to micro-batches. Making data sets is the task of `ingest`."""
