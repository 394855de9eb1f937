"""Sequences in Parquet to padded batches."""
