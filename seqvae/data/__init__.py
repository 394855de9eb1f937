"""Data: from sequences in Parquet to padded batches, by way of a memory-mapped cache."""
