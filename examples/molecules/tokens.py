"""Molecules -> a tokenizer.json: byte pair encoding, in which a token is a frequent piece of a SMILES string, up to a whole ring.

With 512 tokens a molecule of 36 characters comes to 8.4 of them. Nothing is lost: what is encoded is decoded to the same string,
and that is tried on all of them.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from seqvae.errors import DataError, UsageError

TOKENS = 512
LEARNT_FROM = 100_000
"""Molecules, evenly out of all: more change hardly a token."""
AT_ONCE = 10_000


def make_tokenizer(data: Path, path: Path) -> float:
    """Learn from the training molecules in `data`, and return the mean number of tokens of a molecule."""
    splits = {split: _smiles_of(data / f"{split}.parquet") for split in ("train", "valid", "test")}
    tokenizer = learn(splits["train"])
    counts = [count for smiles in splits.values() for count in _counts(tokenizer, smiles)]
    tokenizer.save(str(path))
    return sum(counts) / len(counts)


def learn(smiles: Sequence[str]) -> Any:
    """The same molecules give the same tokens. Every character is one, however rare."""
    Tokenizer, models, decoders, trainers = _tokenizers()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.Fuse()
    characters = sorted(set("".join(smiles)))
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS, initial_alphabet=characters, special_tokens=[], show_progress=False
    )
    every = max(1, len(smiles) // LEARNT_FROM)
    tokenizer.train_from_iterator(smiles[::every][:LEARNT_FROM], trainer)
    return tokenizer


def _counts(tokenizer: Any, smiles: Sequence[str]) -> Iterator[int]:
    """Tokens of each molecule, once it is known that it comes back."""
    remaining = iter(smiles)
    while some := list(islice(remaining, AT_ONCE)):
        ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(some)]
        for one, decoded in zip(some, tokenizer.decode_batch(ids, skip_special_tokens=False), strict=True):
            if decoded != one:
                raise DataError(f"molecule {one!r} comes back from the tokenizer as {decoded!r}")
        yield from map(len, ids)


def _smiles_of(path: Path) -> list[str]:
    return [str(smiles) for smiles in pq.read_table(path)["smiles"].to_pylist()]


def _tokenizers() -> tuple[Any, Any, Any, Any]:
    try:
        from tokenizers import Tokenizer, decoders, models, trainers
    except ModuleNotFoundError as error:
        raise UsageError(f"{error}: pip install -c constraints.txt -e '.[examples]'") from error
    return Tokenizer, models, decoders, trainers
