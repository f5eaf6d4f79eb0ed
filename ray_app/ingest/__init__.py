"""Raw data to Parquet shards. Training imports nothing of it."""
