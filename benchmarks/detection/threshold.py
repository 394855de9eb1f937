"""Is the escape threshold right? Against closed forms, and against trainings at constant weights on both sides of it.

    python -m benchmarks.detection.threshold --closed                     # no training, seconds
    python -m benchmarks.detection.threshold --directory runs/threshold   # both; rows that exist there are kept

For the trainings, a decoder learns without a latent, as a collapsed one has, and the threshold is read on it at the end: the ideal
one, of the decoder alone. Then the same model is trained with its latent at constant weights of 0.25 to 2 times that, from the
beginning. It lives where, on held-out sequences, its information and decoder use are clear of 0 (as in the zoo). Half of the data
sets are real and lie below SEQVAE_REAL_DATA.
"""

import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import numpy as np
import torch
from lightning import LightningModule, Trainer

from benchmarks.detection.zoo_recording import SEQUENCES, quiet_worker, settings_of, train
from benchmarks.detection.zoo_runs import FREE_DATA, STEPS, Flags, common_flags, constant, words_of
from benchmarks.measure import machine, make_parser, print_table
from benchmarks.quality.results import WithoutLatent
from seqvae.errors import run_command
from seqvae.inference.estimates import posterior_statistics
from seqvae.inference.streaming import paired_batches
from seqvae.models.vae import SequenceVAE
from seqvae.monitors.escape import EscapeThreshold, LatentScores, ThresholdReader, escape_threshold
from seqvae.monitors.rules import OF_SEQUENCES
from seqvae.training.fit import make_data
from seqvae.training.network import build_network

PROG = "benchmarks.detection.threshold"
PAIRS = (
    ("demo-tokens", "transformer"),
    ("demo-vectors", "tcn"),
    ("demo-events", "lstm"),
    ("moses_smiles", "transformer"),
    ("japanese_vowels", "small-transformer"),
    ("physionet2012", "mixed"),
)
TIMES = (0.25, 0.5, 0.8, 1.25, 2.0)
SEEDS = (0, 1)


def main() -> None:
    parser = make_parser(PROG, __doc__)
    parser.add_argument("--closed", action="store_true", help="only the closed forms")
    parser.add_argument("--directory", default="runs/threshold", help="of runs, data, caches and rows")
    parser.add_argument("--data", nargs="+", default=[data for data, _ in PAIRS], help="only these data sets")
    options = parser.parse_args()
    closed = closed_forms()
    print_table("Closed forms", closed)
    result: dict[str, Any] = {"benchmark": "threshold", "machine": machine(), "closed": closed}
    if not options.closed:
        quiet_worker()
        has_real = bool(os.environ.get("SEQVAE_REAL_DATA"))
        chosen = [pair for pair in PAIRS if pair[0] in options.data and (has_real or pair[0] in FREE_DATA)]
        rows = [
            row
            for data, decoder in chosen
            for seed in SEEDS
            for row in around(data, decoder, seed, Path(options.directory).resolve())
        ]
        print_table("Constant weights around the ideal threshold of the decoder without a latent", rows)
        above = [row for row in rows if row["times"] > 1]
        short = {
            "above it": len(above),
            "of these alive": sum(row["alive"] for row in above),
            "below it": len(rows) - len(above),
            "of these alive ": sum(row["alive"] for row in rows if row["times"] < 1),
        }
        print_table("In short", [short])
        result |= {"runs": rows, "in_short": [short]}
    print(json.dumps(result))


# --- Closed forms -------------------------------------------------------------------------------------------------------


def closed_forms(sequences: int = 4000) -> list[dict[str, Any]]:
    """Return estimates beside what they should be."""
    rng = np.random.default_rng(0)
    rows = []

    def add(case: str, truth: float, found: EscapeThreshold, in_sample: float) -> None:
        numbers = {"truth": truth, "estimate": found.ideal, "±": found.ideal_error, "in sample": in_sample}
        rows.append({"case": case} | {name: round(value, 3) for name, value in numbers.items()})

    dimensions = 10
    factors = rng.normal(size=(dimensions, 2)) * [1.0, 0.5]
    covariance = factors @ factors.T + np.diag(rng.uniform(0.5, 2, dimensions))
    variance = np.diag(covariance).copy()
    truth = float(np.linalg.eigvalsh(covariance / np.sqrt(np.outer(variance, variance)))[-1])
    values = rng.multivariate_normal(np.zeros(dimensions), covariance, sequences)
    drawn = rng.normal(size=(4, sequences, dimensions)) / np.sqrt(variance)
    add("factorised Gaussian", truth, *estimate(values / variance, drawn))

    steps, level = 20, 0.3
    values = rng.normal(size=(sequences, 1)) * math.sqrt(level) + rng.normal(size=(sequences, steps))
    for order in (0, 1, 3, 6, 19):
        residuals, variances = np.empty((sequences, steps)), np.empty(steps)
        for step in range(steps):
            before = values[:, max(0, step - order) : step]
            fitted = before @ np.linalg.lstsq(before, values[:, step], rcond=None)[0] if before.shape[1] else 0.0
            residuals[:, step] = values[:, step] - fitted
            variances[step] = (residuals[:, step] ** 2).mean()
        scores = (residuals / variances).sum(axis=1)[:, None]
        drawn = (rng.normal(size=(4, sequences, steps)) / np.sqrt(variances)).sum(axis=2)[..., None]
        truth = float((scores**2).mean() / (1 / variances).sum())
        add(f"AR({order}) on sequences with a level", truth, *estimate(scores, drawn))

    for few, places in ((256, 128), (512, 128)):
        case = f"perfect decoder, {few} sequences, {places} places"
        add(case, 1.0, *estimate(rng.normal(size=(few, places)), rng.normal(size=(2, few, places))))
    return rows


def estimate(scores_NM: np.ndarray, drawn_KNM: np.ndarray) -> tuple[EscapeThreshold, float]:
    """Return the product's estimate, and the largest eigenvalue of the sample."""
    flat = drawn_KNM.reshape(-1, scores_NM.shape[1])
    fisher, moment = flat.T @ flat / len(flat), scores_NM.T @ scores_NM / len(scores_NM)
    in_sample = float(np.linalg.eigvals(np.linalg.solve(fisher, moment)).real.max())
    scores = torch.from_numpy(scores_NM)
    return escape_threshold(LatentScores(scores[None], torch.from_numpy(drawn_KNM), scores)), in_sample


# --- Trainings ----------------------------------------------------------------------------------------------------------


class ReadAtEnd(lightning.Callback):
    """The threshold of a network after its last step."""

    def __init__(self, network: SequenceVAE, steps: int) -> None:
        self.network, self.steps = network, steps
        self.found: EscapeThreshold | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.steps and self.found is None:
            vars(pl_module)["latent_scores"] = self.network.latent_scores
            self.found = ThresholdReader().read(trainer, pl_module)


class Ended(NamedTuple):
    """A run at a constant weight."""

    rate: float
    information: float
    use: float
    use_error: float

    @property
    def is_alive(self) -> bool:
        used = self.use >= max(OF_SEQUENCES.clear_use, OF_SEQUENCES.clear_use_errors * self.use_error)
        return used and self.information >= OF_SEQUENCES.clear_information


def around(data: str, decoder: str, seed: int, directory: Path) -> list[dict[str, Any]]:
    """Return the rows of one model: its threshold, and what runs at weights around it come to."""
    kept = directory / "rows" / f"{data}.{decoder}.{seed}.json"
    if kept.exists():
        rows: list[dict[str, Any]] = json.loads(kept.read_text(encoding="utf-8"))
        return rows
    flags = common_flags(data, decoder) | {"--seed": str(seed)}
    name = f"{data}.{decoder}.{seed}"
    settings, network = model_of(flags, data, directory, f"{name}.silent")
    reads = ReadAtEnd(network, STEPS)
    train(
        settings,
        Path(settings.run.output_dir, settings.run.run_name or ""),
        WithoutLatent(network, network.settings.latent_size),
        [reads],
    )
    assert reads.found is not None
    rows = []
    for times in TIMES:
        weight = times * reads.found.ideal
        ended = trained(flags | constant(weight), data, directory, f"{name}.{times:g}")
        rows.append(
            {
                "data": data,
                "decoder": decoder,
                "seed": seed,
                "threshold": f"{reads.found.ideal:.2f} ± {reads.found.ideal_error:.2f}",
                "times": times,
                "weight": round(weight, 3),
                "rate": round(ended.rate, 3),
                "information": round(ended.information, 3),
                "decoder use": f"{ended.use:.2f} ± {ended.use_error:.2f}",
                "alive": ended.is_alive,
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(rows), encoding="utf-8")
    return rows


def model_of(flags: Flags, data: str, directory: Path, name: str) -> tuple[Any, SequenceVAE]:
    settings = settings_of(words_of(flags), data, directory, name)
    torch.manual_seed(settings.run.seed)
    return settings, build_network(make_data(settings), settings.model, settings.compute)


def trained(flags: Flags, data: str, directory: Path, name: str) -> Ended:
    """Train from the beginning, and measure on held-out sequences."""
    settings, network = model_of(flags, data, directory, name)
    folder = Path(settings.run.output_dir, name)
    train(settings, folder, network, [])
    shutil.rmtree(folder)
    found = posterior_statistics(network.eval(), paired_batches(make_data(settings), ["test"], sequences=SEQUENCES))
    assert found.decoder_use is not None
    return Ended(found.rate.value, found.mutual_information, found.decoder_use.value, found.decoder_use.error)


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
