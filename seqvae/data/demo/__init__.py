"""Demo data with known truth."""
