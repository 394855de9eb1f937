"""Rows of docs/results.md from the measurements of `benchmarks.quality.results`: likelihood, latent, distance to the truth."""

import math
from typing import Any

import numpy as np

from seqvae.inference.estimates import Estimate, PosteriorStatistics, SequenceNLL, mean_of

NAMES = {"moses_smiles": "MOSES", "japanese_vowels": "JapaneseVowels", "physionet2012": "PhysioNet 2012"}


def likelihood_row(
    data: str, parameters: int, exact: SequenceNLL, without: SequenceNLL | None, training: str
) -> dict[str, Any]:
    alone = None if without is None else without.per_sequence
    return {
        "set": NAMES.get(data, data),
        "parameters": f"{parameters / 1e6:.2f} M",
        "IW-NLL a sequence": with_error(exact.per_sequence),
        "a step": f"{exact.per_step.value:.3f}",
        "without a latent": "" if alone is None else f"{alone.value:,.{decimals(alone)}f}",
        "difference": "" if without is None else with_error(mean_of(differences_to(exact, without)), sign="+"),
        "training": training,
    }


def latent_row(data: str, statistics: PosteriorStatistics) -> dict[str, Any]:
    cap = math.log(statistics.posteriors)
    return {
        "set": NAMES.get(data, data),
        "rate": f"{statistics.rate.value:.2f}",
        "mutual information (cap)": f"{statistics.mutual_information:.2f} ({cap:.2f})",
        "active units": f"{statistics.active_units} of {len(statistics.kl_per_dim)}",
        "decoder use": "" if statistics.decoder_use is None else with_error(statistics.decoder_use),
    }


def truth_row(unigram: Estimate, true: Estimate, measured: Estimate, share: Estimate) -> dict[str, Any]:
    return {
        "unigram entropy": f"{unigram.value:.4f}",
        "true entropy": f"{true.value:.4f}",
        "IW-NLL": f"{measured.value:.4f}",
        "share of the gap closed, %": f"{share.value:.2f} ± {share.error:.2f}",
    }


def differences_to(exact: SequenceNLL, without: SequenceNLL) -> np.ndarray:
    """Sequence by sequence."""
    assert np.array_equal(exact.sequences_N, without.sequences_N), "the two were not measured on the same sequences"
    return np.asarray(exact.nll_N - without.nll_N)


def with_error(estimate: Estimate, sign: str = "") -> str:
    """
    >>> with_error(Estimate(1084.512, 17.92)), with_error(Estimate(0.2, 0.071), sign="+")
    ('1,084.5 ± 17.9', '+0.20 ± 0.07')
    """
    digits = decimals(estimate)
    return f"{estimate.value:{sign},.{digits}f} ± {estimate.error:.{digits}f}"


def decimals(estimate: Estimate) -> int:
    """As many as mean something."""
    return 1 if estimate.error >= 10 else 2
