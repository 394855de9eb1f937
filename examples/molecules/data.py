"""The molecules of MOSES out of the molsets package -> train.parquet, valid.parquet, test.parquet: `id` and `smiles`.

The published split stands: 1,584,663 molecules train and 176,074 test. What validates is held out of the training molecules by a
hash of each, so that a molecule never changes sides, however many are taken.
"""

import gzip
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from examples.download import Wheel, fetch, members
from examples.parquet import write_once
from seqvae.errors import DataError

WHEEL = Wheel("molsets", "0.3.1", "7f4450e3ebecebe79c3a2a55950c93daddee071120daf64a163d03481e811d34")
MEMBERS = [f"moses/dataset/data/{side}.csv.gz" for side in ("train", "test")]
VALIDATES_ONE_IN = 160
"""About 10,000 of all."""


def make_parquet(downloads: Path, target: Path, limit: int | None = None) -> dict[str, int]:
    """How many molecules each split has. `limit`: only the first so many of each published file."""
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
    """The lines below the heading of a .csv.gz with the one column SMILES."""
    heading, *smiles = gzip.decompress(packed).decode("ascii").splitlines()
    if heading != "SMILES":
        raise DataError(f"{name}: the heading is {heading!r}, and should be SMILES")
    return smiles


def hold_out(published: Sequence[str]) -> tuple[list[str], list[str]]:
    """What trains, and what validates."""
    split: tuple[list[str], list[str]] = ([], [])
    for smiles in published:
        split[_validates(smiles)].append(smiles)
    return split


def _validates(smiles: str) -> bool:
    return int.from_bytes(hashlib.sha256(smiles.encode()).digest()[:8], "big") % VALIDATES_ONE_IN == 0
