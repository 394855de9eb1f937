"""What the figures are drawn from: posterior.jsonl and plots/posteriors.npz in, arrays out.

Not more of either than a picture can show, so that drawing takes bounded time and memory however
long a run is. No torch and no matplotlib here.

Shapes: R readings, P readings at which the decoder was probed, N posteriors, Z latent dimensions.
"""

import json
import math
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seqvae.monitors.reading import NAME

PLOTS = "plots"
"""The folder of figures in a run directory."""
POSTERIORS = "posteriors.npz"
"""In that folder: the posteriors of the last reading that was drawn."""
MOST_READINGS = 1000
"""About as many as a figure has columns of pixels."""
MOST_POSTERIORS = 2048


class History(NamedTuple):
    """The readings of a run; what is not told, or is no number, is NaN."""

    steps_R: np.ndarray
    kl_RZ: np.ndarray
    rate_R: np.ndarray
    mutual_information_R: np.ndarray
    cap_R: np.ndarray
    """The most that the mutual information can be seen to be."""
    active_units_R: np.ndarray
    effective_dimensions_R: np.ndarray
    kl_weight_R: np.ndarray
    probed_steps_P: np.ndarray
    decoder_use_P: np.ndarray
    decoder_use_error_P: np.ndarray
    verdicts: tuple[str | None, ...]
    """R names of the verdict in force after a reading; none: nobody judged."""
    readings_taken: int
    """Where that is more than R, the readings here are spread evenly over them."""

    @property
    def starts_at(self) -> float:
        """The step from which on the first reading looked; readings are about as far apart as the first is from there."""
        apart = float(np.median(np.diff(self.steps_R))) if len(self.steps_R) > 1 else math.inf
        return max(0.0, float(self.steps_R[0]) - apart)


class Posteriors(NamedTuple):
    """Finite ones, float64."""

    mean_NZ: np.ndarray
    logvar_NZ: np.ndarray
    dimensions_Z: np.ndarray
    """What the model calls each column: those before it may have been left out."""
    step: int
    notes: tuple[str, ...]
    """What is not here, and why."""


def read_history(path: Path, most: int = MOST_READINGS) -> History | None:
    """Read a posterior.jsonl, also one that is being written; None where it has no reading yet."""
    with path.open("rb") as file:
        taken, lines = spread(file, most)
    if not taken:
        return None
    rows = [_scalars_and_kl(json.loads(line)) for line in lines]
    probed = [row for row in rows if "decoder_use" in row]
    return History(
        steps_R=_column(rows, "step"),
        kl_RZ=np.stack([row["kl_per_dim"] for row in rows]),
        rate_R=_column(rows, "rate"),
        mutual_information_R=_column(rows, "mutual_information"),
        cap_R=_column(rows, "mutual_information_cap"),
        active_units_R=_column(rows, "active_units"),
        effective_dimensions_R=_column(rows, "effective_dimensions"),
        kl_weight_R=_column(rows, "kl_weight"),
        probed_steps_P=_column(probed, "step"),
        decoder_use_P=_column(probed, "decoder_use"),
        decoder_use_error_P=_column(probed, "decoder_use_error"),
        verdicts=tuple(row.get("verdict") for row in rows),
        readings_taken=taken,
    )


def spread(lines: Iterable[bytes], most: int) -> tuple[int, list[bytes]]:
    """Count the whole lines and keep at most so many, an even number, and the last: one of every 1, 2, 4 ... in a row.

    Of those in a row one at which the decoder was probed is preferred, or seldom probes would meet the lines kept by chance.

    >>> spread([b'{"step": %d}\\n' % step for step in range(1, 6)], most=4)
    (5, [b'{"step": 2}\\n', b'{"step": 4}\\n', b'{"step": 5}\\n'])
    """
    kept: list[bytes] = []
    count, in_a_row, waiting, last = 0, 1, b"", b""
    for line in lines:
        if not line.endswith(b"}\n"):  # it is being written
            break
        count += 1
        waiting = _better(waiting, line)
        if count % in_a_row == 0:
            if len(kept) == most:
                kept = [_better(*pair) for pair in zip(kept[::2], kept[1::2], strict=True)]
                in_a_row *= 2
            if count % in_a_row == 0:
                kept.append(waiting)
                waiting = b""
        last = line
    if count and kept[-1] != last:
        kept.append(last)
    return count, kept


def read_posteriors(path: Path, most: int = MOST_POSTERIORS) -> Posteriors:
    """Read what `save_posteriors` wrote: without dimensions that are nowhere finite, and then without posteriors that are not."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            mean_NZ, logvar_NZ, step = stored["mean_NZ"], stored["logvar_NZ"], int(stored["step"])
    except (zipfile.BadZipFile, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name} holds no posteriors ({error})") from error
    finite_NZ = np.isfinite(mean_NZ) & np.isfinite(logvar_NZ)
    dimensions_Z = np.flatnonzero(finite_NZ.any(axis=0))
    posteriors_N = np.flatnonzero(finite_NZ[:, dimensions_Z].all(axis=1))
    apart = max(1, math.ceil(len(posteriors_N) / most))
    shown_N = posteriors_N[::apart]
    notes = [f"{len(shown_N):,} posteriors" if len(shown_N) != 1 else "1 posterior"]
    if apart > 1:
        notes.append(f"one in {apart} of {len(posteriors_N):,}")
    if len(posteriors_N) < len(mean_NZ):
        notes.append(f"{len(mean_NZ) - len(posteriors_N):,} left out: not finite")
    if len(dimensions_Z) < mean_NZ.shape[1]:
        gone = mean_NZ.shape[1] - len(dimensions_Z)
        notes.append(f"{gone:,} of {mean_NZ.shape[1]:,} dimensions left out: not finite")
    chosen = np.ix_(shown_N, dimensions_Z)
    return Posteriors(mean_NZ[chosen].astype(float), logvar_NZ[chosen].astype(float), dimensions_Z, step, tuple(notes))


def _better(one: bytes, other: bytes) -> bytes:
    probed = b'"decoder_use"'
    return one if probed in one and probed not in other else other


def _scalars_and_kl(row: Any) -> dict[str, Any]:
    """Let go of the lists that no figure shows: thousands of numbers a row, where there are many dimensions."""
    for name in ("step", "kl_per_dim"):
        if not isinstance(row, dict) or name not in row:
            raise ValueError(f"a row of {NAME} has no {name}")
    kept = {name: value for name, value in row.items() if not isinstance(value, list)}
    return kept | {"kl_per_dim": np.array(row["kl_per_dim"], dtype=float)}


def _column(rows: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([row.get(name) for row in rows], dtype=float)
