"""The Lightning callbacks that belong to every run."""
