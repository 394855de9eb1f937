"""Train variational autoencoders on sequences stored in Parquet, fast, and catch posterior collapse while it happens."""

__version__ = "0.1.0"
