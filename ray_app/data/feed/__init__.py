"""Decoded rows to micro-batches, in a worker: windows, the feed that gathers from them, and the caches of decoded rows."""
