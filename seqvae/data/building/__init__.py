"""Blocks of rows to the files of a cache."""
