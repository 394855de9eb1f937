"""The command `seqvae`: one module per verb."""
