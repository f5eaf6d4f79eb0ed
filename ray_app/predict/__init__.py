"""Batch prediction from Parquet to Parquet, one row out for each row in, resumable."""
