"""Batch prediction: a model over a Parquet data set to Parquet, rows in = rows out, resumable."""
