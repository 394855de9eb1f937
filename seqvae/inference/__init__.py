"""Use of a trained model: evaluation, latents, reconstructions, samples, imputed values."""
