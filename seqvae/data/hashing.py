"""A 64-bit hash of sequence ids that is equal on every machine and in every run: for splits and for finding duplicates."""

import numpy as np
import pandas as pd
import pyarrow as pa

IDS_AT_ONCE = 1 << 16
"""Ids that are hashed together: pandas hashes Python strings, and mixing makes copies."""


def hash_ids(ids: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return the hash of each id, uint64 [N]; ids are int64 or text without nulls.

    >>> hash_ids(pa.array([1, 2, 1]))[[0, 2]].tolist() == [hash_ids(pa.array([1]))[0]] * 2
    True
    """
    hashes_N = np.empty(len(ids), np.uint64)
    for start in range(0, len(ids), IDS_AT_ONCE):
        piece = ids.slice(start, IDS_AT_ONCE)
        if pa.types.is_integer(ids.type):
            hashed_P = _mix(piece.to_numpy().astype(np.uint64))
        else:
            words = (
                pa.concat_arrays(piece.chunks) if isinstance(piece, pa.ChunkedArray) else piece
            ).dictionary_encode()
            distinct_words = words.dictionary.to_numpy(zero_copy_only=False).astype(object)
            hashed_P = _mix(pd.util.hash_array(distinct_words, categorize=False).astype(np.uint64))[
                words.indices.to_numpy()
            ]
        hashes_N[start : start + IDS_AT_ONCE] = hashed_P
    return hashes_N


def distinct(hashes_N: np.ndarray) -> np.ndarray:
    """Return each hash once, ascending; sorts in place. `np.unique` puts them into a table of many times their size.

    >>> distinct(np.array([3, 1, 3])).tolist()
    [1, 3]
    """
    hashes_N.sort()
    first_N = np.ones(len(hashes_N), bool)
    np.not_equal(hashes_N[1:], hashes_N[:-1], out=first_N[1:])
    return hashes_N if first_N.all() else hashes_N[first_N]


def _mix(keys_N: np.ndarray) -> np.ndarray:
    """Apply the finaliser of splitmix64: neighbouring numbers come out unrelated. Wraps around on purpose."""
    keys_N = keys_N + np.uint64(0x9E3779B97F4A7C15)
    keys_N = (keys_N ^ (keys_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys_N = (keys_N ^ (keys_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys_N ^ (keys_N >> np.uint64(31))
