"""Metrics over evaluated rows: how they are counted, put together, and how sure they are."""
