"""The molecules of MOSES out of the molsets package as {train,valid,test}.parquet (`id`, `smiles`), and their tokenizer.

The published split stands: 1,584,663 molecules train and 176,074 test. What validates is held out of the training molecules by a
hash of each, so that a molecule never changes sides, however many are taken.

The tokenizer is byte pair encoding, in which a token is a frequent piece of a SMILES string, up to a whole ring. With 512 tokens a
molecule of 36 characters has 8.4 of them. Nothing is lost: what is encoded is decoded to the same string, which is checked on all.
"""

import gzip
import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from examples.shared import Wheel, fetch, members, write_once
from seqvae.errors import DataError, UsageError

WHEEL = Wheel("molsets", "0.3.1", "7f4450e3ebecebe79c3a2a55950c93daddee071120daf64a163d03481e811d34")
MEMBERS = [f"moses/dataset/data/{side}.csv.gz" for side in ("train", "test")]
VALIDATES_ONE_IN = 160
"""About 10,000 in all."""


def make_parquet(downloads: Path, target: Path, limit: int | None = None) -> dict[str, int]:
    """Write the splits, and return their sizes; `limit` takes only the first molecules of each published file."""
    packed = members(fetch(WHEEL, downloads), MEMBERS)
    published, test = (read_smiles(part, name)[:limit] for part, name in zip(packed, MEMBERS, strict=True))
    train, valid = hold_out(published)
    splits = {"train": train, "valid": valid, "test": test}
    first_id = 0
    for split, smiles in splits.items():
        ids = np.arange(first_id, first_id + len(smiles))
        write_once(target / f"{split}.parquet", pa.table({"id": ids, "smiles": pa.array(smiles, pa.string())}))
        first_id += len(smiles)  # ids go on from split to split, so that an id names one molecule of all
    return {split: len(smiles) for split, smiles in splits.items()}


def read_smiles(packed: bytes, name: str) -> list[str]:
    """Return the lines below the heading of a .csv.gz with the one column SMILES."""
    heading, *smiles = gzip.decompress(packed).decode("ascii").splitlines()
    if heading != "SMILES":
        raise DataError(f"{name}: the heading is {heading!r}, and should be SMILES")
    return smiles


def hold_out(published: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what trains, and what validates."""
    split: tuple[list[str], list[str]] = ([], [])
    for smiles in published:
        number = int.from_bytes(hashlib.sha256(smiles.encode()).digest()[:8], "big")
        split[number % VALIDATES_ONE_IN == 0].append(smiles)
    return split


# --- Tokenizer ----------------------------------------------------------------------------------------------------------


TOKENS = 512
LEARNT_FROM = 100_000
"""Molecules, evenly out of all: more change hardly a token."""
CHUNK = 10_000


def make_tokenizer(data: Path, path: Path) -> float:
    """Learn from the training molecules in `data`, and return the mean number of tokens per molecule."""
    splits = {split: _smiles_of(data / f"{split}.parquet") for split in ("train", "valid", "test")}
    tokenizer = learn(splits["train"])
    counts = [count for smiles in splits.values() for count in _counts(tokenizer, smiles)]
    tokenizer.save(str(path))
    return sum(counts) / len(counts)


def learn(smiles: Sequence[str]) -> Any:
    """Learn the same tokens from the same molecules; every character is one, however rare."""
    try:
        from tokenizers import Tokenizer, decoders, models, trainers
    except ModuleNotFoundError as error:
        raise UsageError(f"{error}: pip install -c constraints.txt -e '.[examples]'") from error
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
    """Yield the number of tokens of each molecule, once it is decoded to the same string."""
    remaining = iter(smiles)
    while chunk := list(islice(remaining, CHUNK)):
        ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(chunk)]
        for one, decoded in zip(chunk, tokenizer.decode_batch(ids, skip_special_tokens=False), strict=True):
            if decoded != one:
                raise DataError(f"molecule {one!r} comes back from the tokenizer as {decoded!r}")
        yield from map(len, ids)


def _smiles_of(path: Path) -> list[str]:
    return [str(smiles) for smiles in pq.read_table(path)["smiles"].to_pylist()]
