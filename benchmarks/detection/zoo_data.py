"""Small sets with known factors, which the zoo trains on beside the demo and the real data.

In: a directory, the name of a set and a seed. Out: a folder in there that --data_dir takes, with train.parquet, valid.parquet and
test.parquet; `factors` holds what a latent could know of a sequence. No two sets share a mechanism with the demo data.

Shapes: N sequences, T steps at most, D features, F factors, V words, K topics.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from seqvae.files import wait_for_lock

SPLITS = {"train": 1600, "valid": 400, "test": 400}


class Sample(NamedTuple):
    """Sequences of steps, and the factors that they were made from."""

    steps: list[np.ndarray]
    """Each (T, D) of floats, or (T,) of token ids."""
    factors_NF: np.ndarray


PEN_STEPS, PEN_NOISE = 16, 0.05


def pen(count: int, rng: np.random.Generator, law: np.random.Generator) -> Sample:
    """Draw waves with a pen: each is as high and as wide as its two factors say, and hardly trembles.

    A latent of two dimensions can know nearly all of a drawing, and is precise then: some 3 nats in each.
    """
    factors_N2 = rng.normal(size=(count, 2))
    height_N1, pace_N1 = np.exp(0.3 * factors_N2[:, :1]), 0.6 * np.exp(0.2 * factors_N2[:, 1:])
    time_T = np.arange(PEN_STEPS)
    clean_NTD = np.stack([pace_N1 * time_T / 4 - 1, height_N1 * np.sin(pace_N1 * time_T)], axis=2)
    return Sample([*(clean_NTD + PEN_NOISE * rng.normal(size=clean_NTD.shape))], factors_N2)


AR_FEATURES, AR_SHARE, AR_LOADING = 4, 0.7, 0.5


def ar(count: int, rng: np.random.Generator, law: np.random.Generator) -> Sample:
    """Draw first-order autoregressive noise around a level that two factors set for the whole sequence."""
    loading_FD = AR_LOADING * law.normal(size=(2, AR_FEATURES))
    factors_N2 = rng.normal(size=(count, 2))
    steps = []
    for factors_2, length in zip(factors_N2, rng.integers(8, 17, size=count), strict=True):
        fresh_TD = rng.normal(size=(length, AR_FEATURES))
        rest_TD = np.empty_like(fresh_TD)
        rest_TD[0] = fresh_TD[0]
        for t in range(1, length):
            rest_TD[t] = AR_SHARE * rest_TD[t - 1] + np.sqrt(1 - AR_SHARE**2) * fresh_TD[t]
        steps.append(factors_2 @ loading_FD + rest_TD)
    return Sample(steps, factors_N2)


TOPICS, WORDS, FOLLOWS = 4, 32, 0.5


def topics(count: int, rng: np.random.Generator, law: np.random.Generator) -> Sample:
    """Draw texts from mixtures of four topics; half of the words are the one that always follows the word before."""
    words_KV = law.dirichlet(np.full(WORDS, 0.2), size=TOPICS)
    follower_V = law.permutation(WORDS)
    shares_NK = rng.dirichlet(np.full(TOPICS, 0.3), size=count)
    steps = []
    for shares_K, length in zip(shares_NK, rng.integers(8, 17, size=count), strict=True):
        tokens_T = rng.choice(WORDS, size=length, p=shares_K @ words_KV)
        for t in np.flatnonzero(rng.random(length) < FOLLOWS):
            if t:
                tokens_T[t] = follower_V[tokens_T[t - 1]]
        steps.append(tokens_T)
    return Sample(steps, shares_NK)


GENERATED: dict[str, Callable[[int, np.random.Generator, np.random.Generator], Sample]] = {
    "pen": pen,
    "ar": ar,
    "topics": topics,
}


def write_generated(directory: Path, name: str, seed: int = 0) -> Path:
    """Return the folder with a set, and write it first where it does not exist; safe for several processes at once."""
    target = directory / f"{name}-seed{seed}"
    directory.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(directory / f".{target.name}.lock", lambda: None):
        if not target.exists():
            unfinished = directory / f".{target.name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            first_id = 0
            for number, (split, count) in enumerate(SPLITS.items(), start=1):
                law = np.random.default_rng([seed, 0])  # the same for all splits
                sample = GENERATED[name](count, np.random.default_rng([seed, number]), law)
                column = "tokens" if sample.steps[0].ndim == 1 else "values"
                columns = {
                    "id": np.arange(first_id, first_id + count),
                    column: pa.array([steps.tolist() for steps in sample.steps]),
                    "factors": pa.array(sample.factors_NF.tolist()),
                }
                pq.write_table(pa.table(columns), unfinished / f"{split}.parquet", write_page_checksum=True)
                first_id += count
            unfinished.rename(target)
    return target
