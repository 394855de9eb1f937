"""Networks: batches of sequences in, posteriors and negative log-likelihoods out."""
