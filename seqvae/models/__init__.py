"""Networks: from batches of sequences to posteriors and negative log-likelihoods."""
