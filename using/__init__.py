"""What a trained model is for: its numbers, latents, reconstructions, samples, imputed values."""
