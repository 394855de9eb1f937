"""What is known of a made-up run before its first step."""

from seqvae.training.risk import Features

KNOWN = Features(
    kind="tokens",
    is_autoregressive=True,
    floor=0.0,
    word_dropout=0.0,
    final_weight=1.0,
    schedule="constant",
    rise=0.0,
    latent_size=16,
    is_per_step=False,
    target_kl=None,
    label_weight=0.0,
    total_steps=1000,
    sequences_per_step=32.0,
    training_sequences=4000,
    mean_length=16.0,
    width=64,
    depth=2,
    eigenvalues=None,
)
