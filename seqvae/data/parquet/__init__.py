"""Parquet files to blocks of rows with columns named by their role."""
