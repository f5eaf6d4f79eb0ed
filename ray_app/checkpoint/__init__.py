"""Snapshots made durable: their files, and the store that commits, verifies, falls back and tidies up."""
