"""`seqvae report` and `seqvae compare`: what `python -m seqvae.reports` does."""

from collections.abc import Sequence


def run(verb: str, words: Sequence[str]) -> int:
    from seqvae.reports.__main__ import main

    return main(words if verb == "report" else ["--compare", *words])
