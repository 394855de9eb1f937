"""Batches of sequences -> posteriors and negative log-likelihoods: a kind is one input embedding and one likelihood, the
backbones in between do not know which kind they serve."""
