"""Train one run of the zoo with the product's own `fit`, and keep all that a detector may see, with what the run came to.

In: a `ZooRun` and the zoo's directory. Out: DIR/records/<name>.json.gz, written at once or not at all; the run directory is
deleted. The decoder without a latent that runs are compared with is trained once and kept in DIR/baselines.
"""

import contextlib
import gzip
import json
import logging
import math
import os
import shutil
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from benchmarks.detection.zoo_data import GENERATED, write_generated
from benchmarks.detection.zoo_runs import (
    DEMO_KINDS,
    DEMO_MEAN_LENGTH,
    DEMO_SEED,
    DEMO_SEQUENCES,
    TREATMENTS,
    Alteration,
    ZooRun,
)
from benchmarks.detection.zoo_scoring import Measured, record_every
from benchmarks.quality.results import WithoutLatent
from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import TrainingSettings
from seqvae.data.batch import Batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.demo import write_demo
from seqvae.errors import DivergedError
from seqvae.files import wait_for_lock
from seqvae.inference.estimates import Estimate, importance_weighted_nll, mean_of, posterior_statistics
from seqvae.inference.streaming import batches_of, paired_batches
from seqvae.models.backbones import Decoder
from seqvae.models.posteriors import Posterior, PosteriorFamily
from seqvae.models.vae import SequenceVAE
from seqvae.monitors.callback import FEWEST_READINGS, PosteriorMetricsMonitor
from seqvae.monitors.contract import step_outputs_of
from seqvae.monitors.decoder_use import undisturbed
from seqvae.monitors.escape import EscapeThreshold, ThresholdReader, why_unreadable
from seqvae.monitors.formulas import mean_of_variances, variance_of_means
from seqvae.monitors.reading import NAME, Reading, read_readings, to_row
from seqvae.monitors.window import with_escape_threshold
from seqvae.training.fit import fit, make_data
from seqvae.training.network import build_network
from seqvae.training.risk import features_of

PROBED_SEQUENCES = 128
FAINT_ENOUGH = 1.0
"""Nats of rate below which escape thresholds are recorded: no judge asks for one of a latent that carries more."""
FIXED_LOGVAR = math.log(0.5)
"""A KL of 0.097 nats per dimension that nothing can take away: 1.5 for 16."""
SEQUENCES = 400
"""Sequences of the test split, chosen once, that a final network is measured on; all where there are fewer."""
SAMPLES = 32
"""Samples for the importance-weighted NLL of each sequence."""
BASELINE_SEEDS = (0, 1)
"""Seeds of the baselines. Runs are compared with the first; the second tells how far chance alone moves such a comparison."""


# --- What is done to networks -----------------------------------------------------------------------------------------


class AlteredPosterior(PosteriorFamily):
    """A posterior with a constant variance (its means may move), or one that passes no gradient on to its encoder."""

    def __init__(self, posterior: nn.Module, *, has_fixed_variance: bool) -> None:
        super().__init__()
        self.posterior = posterior
        self.has_fixed_variance = has_fixed_variance

    def forward(self, hidden: Tensor, mask: Tensor) -> Posterior:
        if not self.has_fixed_variance:
            return self.posterior(hidden.detach(), mask)
        mean, logvar, mask = self.posterior(hidden, mask)
        return Posterior(mean, 0 * logvar + FIXED_LOGVAR, mask)


class CutOffDecoder(nn.Module):
    """A decoder that sees z = 0, or noise, whatever z is."""

    def __init__(self, decoder: Decoder, noise: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.autoregressive = decoder.autoregressive
        self.noise = noise
        self.latent = decoder.latent

    def add_at_layers(self, inputs_BTW: Tensor, added_BTM: Tensor) -> Tensor:
        return self.decoder.add_at_layers(inputs_BTW, 0 * added_BTM)

    def forward(self, inputs_BTW: Tensor, z: Tensor) -> Tensor:
        # Added up with z so that its gradient is a plain 0.
        return self.decoder(inputs_BTW, 0 * z.clamp(-1, 1) + (torch.randn_like(z) if self.noise else 0))


def altered(network: SequenceVAE, alteration: Alteration) -> SequenceVAE:
    """Change the network in place, and return it."""
    match alteration:
        case "fixed variance" | "dead encoder":
            is_fixed = alteration == "fixed variance"
            network.add_module("posterior", AlteredPosterior(network.posterior, has_fixed_variance=is_fixed))
        case "z is 0" | "z is noise":
            network.add_module("decoder", CutOffDecoder(network.decoder, noise=alteration == "z is noise"))
    return network


# --- One run ----------------------------------------------------------------------------------------------------------


class FirstNonFinite(Callback):
    """The optimizer step whose loss was the first that was not finite."""

    step: int | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.step is None and not math.isfinite(float(outputs["loss"])):
            self.step = trainer.global_step


class ThresholdRecorder(Callback):
    """The escape threshold at every fiftieth of a run whose rate is small, for judges that ask for it in a replay.

    It stands behind the monitor among a Trainer's callbacks, as it goes by its readings.
    """

    def __init__(self, monitor: PosteriorMetricsMonitor, total_steps: int) -> None:
        self.monitor, self.reader = monitor, ThresholdReader()
        self.every_n_steps = max(1, total_steps // FEWEST_READINGS)
        self.found: dict[int, EscapeThreshold] = {}
        """By the step that they were read at."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        reading, step = self.monitor.reading, trainer.global_step
        if reading is None or reading.step != step or step % self.every_n_steps:
            return
        if why_unreadable(pl_module, step_outputs_of(pl_module, outputs, batch)) is not None:
            return
        if reading.rate < FAINT_ENOUGH and reading.escape_threshold is None:
            self.found[step] = self.reader.read(trainer, pl_module)

    def add_to(self, reading: Reading) -> Reading:
        found = self.found.get(reading.step)
        return reading if found is None else with_escape_threshold(reading, found)


def record(run: ZooRun, directory: Path) -> Path:
    """Train, measure and write, unless the record exists."""
    path = record_path(run, directory)
    if path.exists():
        return path
    without_latent_N = None
    if run.baseline is not None:
        without_latent_N, *_ = [baseline(run, directory, seed) for seed in BASELINE_SEEDS]
    start = time.perf_counter()
    settings = settings_of(run.words, run.data, directory, run.name)
    run_directory = Path(settings.run.output_dir, run.name)
    data = make_data(settings)
    torch.manual_seed(settings.run.seed)
    network = altered(build_network(data, settings.model, settings.compute), run.alteration)
    monitor = PosteriorMetricsMonitor(
        update_frequency=record_every(run.steps),
        plot_frequency=None,
        probe_every_n_readings=1,
        probe_batch=probe_batch(data),
        log_dir=run_directory,
    )
    first_nonfinite = FirstNonFinite()
    thresholds = ThresholdRecorder(monitor, run.steps)
    message = train(settings, run_directory, network, [monitor, first_nonfinite, thresholds])
    training_seconds = time.perf_counter() - start
    has_finite_weights = all(bool(weights.isfinite().all()) for weights in network.parameters())
    measured = measure(network, data, without_latent_N)._asdict() if has_finite_weights else None
    content = {
        "name": run.name,
        **run._asdict(),
        "treatment_kind": TREATMENTS[run.treatment].kind,
        "alteration": run.alteration,
        "seed": run.seed,
        "words": run.words,
        "total_steps": run.steps,
        "objective": asdict(settings.objective),
        "features": features_of(
            settings.model, settings.objective, data, run.steps, TREATMENTS[run.treatment].batch
        )._asdict(),
        "diverged_at_step": first_nonfinite.step,
        "said": message,
        "has_finite_weights": has_finite_weights,
        "measured": measured,
        "seconds": [round(training_seconds, 1), round(time.perf_counter() - start - training_seconds, 1)],
        "readings": [to_row(thresholds.add_to(reading)) for reading in read_readings(run_directory / NAME)],
    }
    shutil.rmtree(run_directory)
    write_at_once(path, content)
    return path


def baseline(run: ZooRun, directory: Path, seed: int) -> np.ndarray:
    """Return the NLL of the held-out sequences under the same decoder without a latent, which the first caller trains."""
    path = baseline_path(run, directory, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(path.with_suffix(".lock"), lambda: None):
        if not path.exists():
            name = f"{run.baseline}.seed-{seed}"
            settings = settings_of((*run.baseline_words, "--seed", str(seed)), run.data, directory, name)
            run_directory = Path(settings.run.output_dir, name)
            data = make_data(settings)
            torch.manual_seed(settings.run.seed)
            vae = build_network(data, settings.model, settings.compute)
            network = WithoutLatent(vae, settings.model.latent_size)
            message = train(settings, run_directory, network, [])
            assert message is None, f"the baseline {run.baseline} diverged: {message}"
            write_at_once(path, {"nll": importance_weighted_nll(network, held_out(data), samples=1).nll_N.tolist()})
            shutil.rmtree(run_directory)
    return np.array(read_json(path)["nll"])


def train(
    settings: TrainingSettings, run_directory: Path, network: nn.Module, callbacks: Sequence[Callback]
) -> str | None:
    """Train in silence, from the beginning; return the message of a run that diverged."""
    shutil.rmtree(run_directory, ignore_errors=True)  # of a zoo that was interrupted
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fit(settings, callbacks, network=network)
        except DivergedError as error:
            return str(error)
    return None


def settings_of(words: Sequence[str], data: str, directory: Path, run_name: str) -> TrainingSettings:
    if data in DEMO_KINDS:
        sizes: dict[str, Any] = {"sequences": DEMO_SEQUENCES, "mean_length": DEMO_MEAN_LENGTH, "seed": DEMO_SEED}
        folder = write_demo(directory / "data", DEMO_KINDS[data], **sizes)
    elif data in GENERATED:
        folder = write_generated(directory / "data", data)
    else:
        folder = Path(os.environ["SEQVAE_REAL_DATA"]) / data
    places = ("--data_dir", str(folder), "--cache_dir", str(directory / "cache"))
    run = ("--output_dir", str(directory / "runs"), "--run_name", run_name, "--resume", "auto")
    prog = "benchmarks.detection.collapse_zoo"
    filled = [word.format(folder=folder) for word in words]
    return parse_command_line(TrainingSettings, [*places, *run, *filled], prog=prog, description="")


def probe_batch(data: SequenceDataModule) -> Batch:
    """Return fixed validation sequences of all lengths, as many as the product probes by itself."""
    split = data.split("valid")
    return split.gather(np.sort(np.random.default_rng(0).permutation(len(split))[:PROBED_SEQUENCES]))


def quiet_worker() -> None:
    """Set up a process that trains: one thread, and no notes of Lightning's."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


# --- What a final network is worth on sequences that it never saw ------------------------------------------------------


def held_out(data: SequenceDataModule) -> list[Batch]:
    return list(batches_of(data, "test", sequences=SEQUENCES))


def measure(network: SequenceVAE, data: SequenceDataModule, without_latent_N: np.ndarray | None) -> Measured:
    """Measure a network beside the NLLs of the same sequences under the decoder without a latent, where there is one."""
    batches = held_out(data)
    statistics_ = posterior_statistics(network, paired_batches(data, ["test"], sequences=SEQUENCES))
    with undisturbed(network, torch.device("cpu"), torch.autocast("cpu", enabled=False)):
        posteriors = [network.encode(batch) for batch in batches]
    mean_PZ = torch.cat([posterior.mean[posterior.mask] for posterior in posteriors])
    logvar_PZ = torch.cat([posterior.logvar[posterior.mask] for posterior in posteriors])
    gain = None
    if without_latent_N is not None:
        gain = mean_of(without_latent_N - importance_weighted_nll(network, batches, samples=SAMPLES).nll_N)
    use = statistics_.decoder_use or Estimate(math.nan, math.nan)
    per_posterior = statistics_.sequences / len(mean_PZ)
    return Measured(
        sequences=statistics_.sequences,
        scope="step" if network.latent_per_step else "sequence",
        rate=finite(statistics_.rate.value * per_posterior),
        kl_per_dim=tuple(finite(kl * per_posterior) for kl in statistics_.kl_per_dim),
        mutual_information=finite(statistics_.mutual_information),
        mutual_information_cap=math.log(statistics_.posteriors),
        active_units=statistics_.active_units,
        variance_of_means=tuple(map(finite, variance_of_means(mean_PZ).tolist())),
        mean_of_variances=tuple(map(finite, mean_of_variances(logvar_PZ).tolist())),
        decoder_use=finite(use.value),
        decoder_use_error=finite(use.error),
        nll_without_latent=None if without_latent_N is None else finite(float(without_latent_N.mean())),
        is_compared=gain is not None,
        gain=None if gain is None else finite(gain.value),
        gain_error=None if gain is None else finite(gain.error),
    )


def finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


# --- Files: one gzipped JSON for each run and each baseline -----------------------------------------------------------


def record_path(run: ZooRun, directory: Path) -> Path:
    return directory / "records" / f"{run.name}.json.gz"


def baseline_path(run: ZooRun, directory: Path, seed: int) -> Path:
    return directory / "baselines" / f"{run.baseline}.seed-{seed}.json.gz"


def seed_errors(runs: Iterable[ZooRun], directory: Path) -> dict[str, float]:
    """Return for each data set the standard deviation, over seeds, of the difference between two networks' held-out NLL.

    Pooled over the baselines of all its decoders, as two seeds alone may agree by chance; 0 where there are none yet.
    """
    squares: dict[str, dict[str, float]] = defaultdict(dict)
    for run in runs:
        if run.baseline is None:
            continue
        paths = [baseline_path(run, directory, seed) for seed in BASELINE_SEEDS]
        if all(path.exists() for path in paths):
            first, second = (statistics.fmean(read_json(path)["nll"]) for path in paths)
            squares[run.data][run.baseline] = (first - second) ** 2
    return defaultdict(float, {data: math.sqrt(statistics.fmean(found.values())) for data, found in squares.items()})


def write_at_once(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".unfinished")
    with gzip.open(beside, "wt", encoding="utf-8") as file:
        json.dump(content, file, allow_nan=False)
    beside.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        content: dict[str, Any] = json.load(file)
    return content
