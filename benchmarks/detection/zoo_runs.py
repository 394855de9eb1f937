"""Train one run of the zoo through the product's own `fit`, and keep all that a detector may see and the truth beside it.

In: a `Species` and the zoo's directory. Out: DIR/records/<name>.json.gz, written at once or not at all; the run directory is
deleted. The decoder without a latent that the truth is measured against is trained once and kept in DIR/baselines.
"""

import contextlib
import logging
import math
import os
import shutil
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from benchmarks.detection.zoo_files import BASELINE_SEEDS, baseline_path, read_json, record_path, write_at_once
from benchmarks.detection.zoo_species import DEMO_KINDS, DEMO_MEAN_LENGTH, DEMO_SEQUENCES, STEPS, Body, Species
from benchmarks.detection.zoo_truth import held_out, measure, measure_without_latent
from benchmarks.quality.results import WithoutLatent
from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import TrainingSettings
from seqvae.data.batch import Batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.demo.write import write_demo
from seqvae.errors import DivergedError
from seqvae.files import wait_for_lock
from seqvae.models.backbones import Decoder
from seqvae.models.posteriors import Posterior
from seqvae.models.vae import SequenceVAE
from seqvae.monitors.callback import PosteriorMetricsMonitor
from seqvae.monitors.reading import NAME, read_readings, to_row
from seqvae.training.fit import fit, make_data
from seqvae.training.network import build_network

EVERY_N_STEPS = 2
PROBED_SEQUENCES = 32
FIXED_LOGVAR = math.log(0.5)
"""A KL of 0.097 nats a dimension that nothing can take away: 1.5 for 16."""


class FixedVariance(nn.Module):
    """A posterior whose variance is a constant (its means may move)."""

    least_sequences, synchronised = 1, False

    def __init__(self, posterior: nn.Module) -> None:
        super().__init__()
        self.posterior = posterior

    def forward(self, hidden: Tensor, mask: Tensor) -> Posterior:
        mean, logvar, mask = self.posterior(hidden, mask)
        return Posterior(mean, 0 * logvar + FIXED_LOGVAR, mask)


class DeadEncoder(nn.Module):
    """A posterior that no gradient leaves: the encoder below it stays what it was at the start."""

    least_sequences, synchronised = 1, False

    def __init__(self, posterior: nn.Module) -> None:
        super().__init__()
        self.posterior = posterior

    def forward(self, hidden: Tensor, mask: Tensor) -> Posterior:
        return self.posterior(hidden.detach(), mask)


class CutOff(nn.Module):
    """A decoder that is told z = 0, or noise, whatever z is."""

    def __init__(self, decoder: Decoder, noise: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.autoregressive = decoder.autoregressive
        self.noise = noise

    def forward(self, inputs_BTW: Tensor, z: Tensor) -> Tensor:
        # Added up with z so that its gradient is a plain 0.
        return self.decoder(inputs_BTW, 0 * z.clamp(-1, 1) + (torch.randn_like(z) if self.noise else 0))


def embody(network: SequenceVAE, body: Body) -> SequenceVAE:
    """Change the network in place."""
    match body:
        case "fixed variance":
            network.add_module("posterior", FixedVariance(network.posterior))
        case "dead encoder":
            network.add_module("posterior", DeadEncoder(network.posterior))
        case "told z = 0" | "told noise":
            network.add_module("decoder", CutOff(network.decoder, noise=body == "told noise"))
    return network


class FirstNonFinite(Callback):
    """The optimizer step whose loss was the first that was not finite."""

    step: int | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.step is None and not math.isfinite(float(outputs["loss"])):
            self.step = trainer.global_step


def record(species: Species, directory: Path) -> Path:
    """Train, measure and write, unless the record is there."""
    without_latent_N, *_ = [baseline(species, directory, seed) for seed in BASELINE_SEEDS]
    path = record_path(species, directory)
    if path.exists():
        return path
    start = time.perf_counter()
    settings = settings_of(species.words, species.data, directory, species.name)
    data = make_data(settings)
    torch.manual_seed(settings.run.seed)
    network = embody(build_network(data, settings.model, settings.compute), species.body)
    first = FirstNonFinite()
    said = trained(settings, network, [monitor_of(data, run_directory(settings)), first])
    training_seconds = time.perf_counter() - start
    has_finite_weights = all(bool(weights.isfinite().all()) for weights in network.parameters())
    truth = measure(network, held_out(data), without_latent_N)._asdict() if has_finite_weights else None
    row = {
        "name": species.name,
        **species._asdict(),
        "body": species.body,
        "seed": species.seed,
        "words": species.words,
        "total_steps": STEPS,
        "objective": asdict(settings.objective),
        "diverged_at_step": first.step,
        "said": said,
        "has_finite_weights": has_finite_weights,
        "measured": truth,
        "seconds": [round(training_seconds, 1), round(time.perf_counter() - start - training_seconds, 1)],
        "readings": [to_row(reading) for reading in read_readings(run_directory(settings) / NAME)],
    }
    shutil.rmtree(run_directory(settings))
    write_at_once(path, row)
    return path


def baseline(species: Species, directory: Path, seed: int) -> np.ndarray:
    """NLL of the held-out sequences under the same decoder without a latent; trained by whoever needs it first."""
    path = baseline_path(species, directory, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(path.with_suffix(".lock"), lambda: None):
        if not path.exists():
            name = f"{species.baseline}.seed-{seed}"
            words = (*species.baseline_words, "--seed", str(seed))
            settings = settings_of(words, species.data, directory, name)
            data = make_data(settings)
            torch.manual_seed(settings.run.seed)
            vae = build_network(data, settings.model, settings.compute)
            network = WithoutLatent(vae, settings.model.latent_size)
            said = trained(settings, network, [])
            assert said is None, f"the baseline {species.baseline} diverged: {said}"
            nll_N = measure_without_latent(network, held_out(data))
            write_at_once(path, {"nll": nll_N.tolist()})
            shutil.rmtree(run_directory(settings))
    return np.array(read_json(path)["nll"])


def trained(settings: TrainingSettings, network: nn.Module, callbacks: Sequence[Callback]) -> str | None:
    """Train in silence, from the beginning; what the run said when it diverged."""
    shutil.rmtree(run_directory(settings), ignore_errors=True)  # of a zoo that was interrupted
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fit(settings, callbacks, network=network)
        except DivergedError as error:
            return str(error)
    return None


def settings_of(words: Sequence[str], data: str, directory: Path, run_name: str) -> TrainingSettings:
    places = ("--data_dir", str(data_folder(data, directory)), "--cache_dir", str(directory / "cache"))
    run = ("--output_dir", str(directory / "runs"), "--run_name", run_name, "--resume", "auto")
    return parse_command_line(
        TrainingSettings, [*places, *run, *words], prog="benchmarks.detection.collapse_zoo", description=""
    )


def data_folder(data: str, directory: Path) -> Path:
    if data not in DEMO_KINDS:
        return Path(os.environ["SEQVAE_REAL_DATA"]) / data
    return write_demo(directory / "data", DEMO_KINDS[data], sequences=DEMO_SEQUENCES, mean_length=DEMO_MEAN_LENGTH)


def run_directory(settings: TrainingSettings) -> Path:
    assert settings.run.run_name is not None
    return Path(settings.run.output_dir) / settings.run.run_name


def monitor_of(data: SequenceDataModule, log_dir: Path) -> PosteriorMetricsMonitor:
    return PosteriorMetricsMonitor(
        update_frequency=EVERY_N_STEPS,
        plot_frequency=None,
        probe_every_n_readings=1,
        probe_batch=probe_batch(data),
        log_dir=log_dir,
    )


def probe_batch(data: SequenceDataModule) -> Batch:
    """Fixed validation sequences, neighbours of similar length, as they exchange their latents."""
    split = data.split("valid")
    chosen_N = np.random.default_rng(0).choice(len(split), PROBED_SEQUENCES, replace=False)
    return split.gather(chosen_N[np.argsort(np.asarray(split.lengths_N)[chosen_N], kind="stable")])


def be_quiet_worker() -> None:
    """For each process of the zoo."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
