"""Raw data to a data set of Parquet shards: pieces of a source, what runs them, the shards and the target. Training imports none of it."""
