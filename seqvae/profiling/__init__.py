"""Measurements of how fast a training goes, what it needs, and what would make it faster."""
