"""Training: from settings to a trained model in a run directory."""
