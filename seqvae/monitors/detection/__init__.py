"""Readings to verdicts: plain Python, no torch, no clock, no files."""
