"""The blocks of the backbones, one architecture per file."""
