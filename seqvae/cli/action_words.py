"""What stands before the flags of a command: `use_model.py encode CHECKPOINT --data_dir my_data`."""

from collections.abc import Sequence

from seqvae.exit_codes import UsageError

ASKS = {"--help", "-h", "--version", "--print_config", "--print-config"}
"""Whoever asks for these need not say what is to be used."""


def leading(words: Sequence[str], names: Sequence[str], example: str) -> tuple[list[str], list[str]]:
    """As many words as there are names, and the flags behind them.

    >>> leading(["last.ckpt", "--count", "5"], ["CHECKPOINT"], "sample CHECKPOINT")
    (['last.ckpt'], ['--count', '5'])
    """
    first_flag = next((place for place, word in enumerate(words) if word.startswith("--") or word == "-h"), len(words))
    given, flags = list(words[:first_flag]), list(words[first_flag:])
    if len(given) == len(names) or not ASKS.isdisjoint(flags):
        return given, flags
    if len(given) > len(names):
        raise UsageError(f"{given[len(names)]!r}: nothing more is wanted before the flags. Wanted: {example}")
    raise UsageError(f"{names[len(given)]} is missing, which stands before the flags. Wanted: {example}")
