"""Sequences in Parquet -> padded batches: kinds, reading, the cache, the batch plan, the loader, demo data."""
