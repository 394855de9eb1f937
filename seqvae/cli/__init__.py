"""The command `seqvae` and its verbs."""
