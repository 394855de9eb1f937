"""What the one command reaches: train as it does, measure on the test split, compare with the same decoder without a latent.

    python -m benchmarks.quality.results --data demo
    python -m benchmarks.quality.results --data moses_smiles --free_bits 0.5          # flags of train_optimized.py, for a variant
    python -m benchmarks.quality.results --data physionet2012 --evaluate runs/events-1/checkpoints/last.ckpt

Real sets lie below SEQVAE_REAL_DATA. The comparison trains the decoder alone, with z = 0, for as many steps on the same
batches; its NLL is exact, and its difference to the model's importance-weighted NLL is taken sequence by sequence.
"""

import argparse
import csv
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measure import machine, print_table
from benchmarks.quality.results_tables import differences_to, latent_row, likelihood_row, truth_row
from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import OptimizedSettings, TrainingSettings
from seqvae.data.batch import Batch
from seqvae.data.cache import default_cache_dir
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.demo.processes import TokenTruth
from seqvae.data.demo.write import read_tokens, read_truth, write_demo
from seqvae.errors import UsageError, run_command
from seqvae.inference.estimates import (
    Estimate,
    PosteriorStatistics,
    SequenceNLL,
    importance_weighted_nll,
    mean_of,
    posterior_statistics,
)
from seqvae.inference.streaming import batches_of
from seqvae.models.vae import SequenceVAE, VAEOutput
from seqvae.training.fit import fit, make_data
from seqvae.training.network import build_network, load_weights, rebuild_network

PROG = "benchmarks.quality.results"
DEMO = "demo"
REAL: dict[str, list[str]] = {"moses_smiles": ["--tokenizer", "characters"], "japanese_vowels": [], "physionet2012": []}
"""And the flags that each needs beside --data_dir."""


class Options(NamedTuple):
    """What this command takes beside the flags of train_optimized.py."""

    data: str
    evaluate: str | None
    without_latent: bool
    samples: int
    sequences: int
    bf16: bool = False

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.bf16 else None


class WithoutLatent(nn.Module):
    """The decoder of a SequenceVAE, always told z = 0: an autoregressive model of the data, whose NLL is exact."""

    def __init__(self, vae: SequenceVAE, latent_size: int) -> None:
        super().__init__()
        self.vae = vae
        self.latent_size = latent_size

    def forward(self, batch: Batch) -> VAEOutput:
        real_B = batch.lengths_B > 0
        zeros_BZ = torch.zeros(len(real_B), self.latent_size, device=real_B.device)
        steps_B = (batch.lengths_B + self.vae.likelihood.extra_steps) * real_B
        return VAEOutput(zeros_BZ, zeros_BZ, real_B, self.nll_given_z(batch, zeros_BZ), steps_B)

    def nll_given_z(self, batch: Batch, z: Tensor) -> Tensor:
        return self.vae.nll_given_z(batch, torch.zeros_like(z))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", choices=[DEMO, *REAL], required=True)
    parser.add_argument(
        "--evaluate", metavar="CHECKPOINT", help="of a run with these data: train nothing, only measure"
    )
    parser.add_argument(
        "--without_latent",
        action=argparse.BooleanOptionalAction,
        help="also train the decoder alone (default: unless --evaluate)",
    )
    parser.add_argument("--samples", type=int, default=500, help="for the importance-weighted NLL of a sequence")
    parser.add_argument("--sequences", type=int, default=1000, help="of the test split that it is measured on, at most")
    parser.add_argument(
        "--bf16", action="store_true", help="measure the NLL in bf16: half the time, off by up to 0.02 %%"
    )
    given, words = parser.parse_known_args()
    without_latent = given.evaluate is None if given.without_latent is None else given.without_latent
    options = Options(given.data, given.evaluate, without_latent, given.samples, given.sequences, given.bf16)
    settings = parse_command_line(
        OptimizedSettings, [*flags_of(options.data), *words], prog=PROG, description=__doc__ or ""
    )
    print(json.dumps(run(settings, options)))


def flags_of(data: str) -> list[str]:
    if data == DEMO:
        return []
    folder = os.environ.get("SEQVAE_REAL_DATA")
    if not folder:
        raise UsageError(f"--data {data}: SEQVAE_REAL_DATA does not say where the real data are")
    return ["--data_dir", str(Path(folder) / data), *REAL[data]]


def run(settings: TrainingSettings, options: Options) -> dict[str, Any]:
    data = make_data(settings)
    start = time.perf_counter()
    checkpoint = Path(options.evaluate) if options.evaluate else trained(settings)
    training_seconds = time.perf_counter() - start
    network = rebuild_network(checkpoint)
    start = time.perf_counter()
    exact = importance_weighted_nll(network, chosen(data, options), samples=options.samples, autocast=options.autocast)
    evaluation_seconds = time.perf_counter() - start
    statistics = posterior_statistics(network, batches_of(data, "test"))
    rows = [*rows_of_likelihood(exact, options.samples), *rows_of_posteriors(statistics)]
    if data.description.kind == "tokens":
        rows.append(row("perplexity", exact.perplexity))
    tables: dict[str, Any] = {"latent": [latent_row(options.data, statistics)]}
    if options.data == DEMO and data.description.kind == "tokens":
        truth = compared_with_truth(exact, settings, data)
        rows += rows_of_truth(truth)
        tables["truth"] = [truth_row(truth.unigram, truth.true, exact.per_step, truth.share)]
    without = nll_without_latent(settings, data, options) if options.without_latent else None
    if without is not None:
        rows += rows_without_latent(exact, without)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    training = "" if options.evaluate else f"{training_seconds:.0f} s, passes: {passes_of(checkpoint)}"
    tables["likelihood"] = [likelihood_row(options.data, parameters, exact, without, training)]
    print_table(f"{options.data}, test split, {checkpoint}", rows)
    return {
        "benchmark": "results",
        "machine": machine(),
        "data": options.data,
        "command": " ".join(["python -m benchmarks.quality.results", *sys.argv[1:]]),
        "parameters": parameters,
        "training_seconds": None if options.evaluate else round(training_seconds, 1),
        "importance_weighting_seconds": round(evaluation_seconds, 1),
        "kl_per_dim": [round(value, 4) for value in statistics.kl_per_dim],
        "rows": rows,
        **tables,
    }


def passes_of(checkpoint: Path) -> int:
    """Epochs that the run began."""
    with (checkpoint.parent.parent / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return 1 + max(int(row["epoch"]) for row in csv.DictReader(file))


def trained(settings: TrainingSettings) -> Path:
    """The last checkpoint of a run as the command makes it; watching it changes nothing, and is left out."""
    return last_checkpoint(fit(settings, []).directory)


def last_checkpoint(run: Path) -> Path:
    return run / "checkpoints" / "last.ckpt"


def chosen(data: SequenceDataModule, options: Options) -> list[Batch]:
    return list(batches_of(data, "test", sequences=options.sequences))


def nll_without_latent(settings: TrainingSettings, data: SequenceDataModule, options: Options) -> SequenceNLL:
    """The latent's own settings have no meaning here: nothing is paid for a KL that is 0."""
    model = replace(settings.model, latent_scope="sequence", posterior="gaussian")
    settings = replace(settings, model=model, objective=replace(settings.objective, free_bits=0.0, target_kl=None))
    if settings.run.run_name is not None:
        settings = replace(settings, run=replace(settings.run, run_name=f"{settings.run.run_name}-without-latent"))
    torch.manual_seed(settings.run.seed)
    network = WithoutLatent(build_network(data, model, settings.compute), model.latent_size)
    load_weights(network, last_checkpoint(fit(settings, [], network=network).directory), data.description)
    return importance_weighted_nll(network, chosen(data, options), samples=1, autocast=options.autocast)


def rows_of_likelihood(exact: SequenceNLL, samples: int) -> list[dict[str, Any]]:
    return [
        row(f"IW-NLL ({samples} samples), nats a sequence", exact.per_sequence, f"{len(exact.nll_N):,} sequences"),
        row(
            "IW-NLL, nats a step",
            exact.per_step,
            f"{int(exact.steps_N.sum()):,} steps, perplexity {exact.perplexity:.4g}",
        ),
    ]


def rows_of_posteriors(statistics: PosteriorStatistics) -> list[dict[str, Any]]:
    cap = float(np.log(statistics.posteriors))
    information = f"{statistics.posteriors:,} posteriors, at most {cap:.2f}"
    rows = [
        row("ELBO, nats a sequence", statistics.elbo, f"{statistics.sequences:,} sequences"),
        row("NLL given z", statistics.nll),
        row("rate (KL)", statistics.rate),
        row("mutual information", statistics.mutual_information, information),
        row("active units", statistics.active_units, f"of {len(statistics.kl_per_dim)}"),
    ]
    if statistics.decoder_use is not None:
        rows.append(row("decoder use", statistics.decoder_use))
    return rows


class Truth(NamedTuple):
    """Entropies in nats a symbol, and how much of the way between them was gone, in percent."""

    unigram: Estimate
    true: Estimate
    share: Estimate


def compared_with_truth(exact: SequenceNLL, settings: TrainingSettings, data: SequenceDataModule) -> Truth:
    """On the very same sequences."""
    folder = demo_folder(settings)
    truth, sample = read_truth(folder), read_tokens(folder / "test.parquet")
    assert isinstance(truth, TokenTruth)
    stored = data.split("test")
    first_id = min(int(one) for one in stored.ids(np.arange(len(stored))))
    places_N = np.array([int(one) for one in stored.ids(exact.sequences_N)]) - first_id
    unigram_N, true_N = (
        -log_likelihood(sample.tokens_S, sample.offsets_N1)[places_N]
        for log_likelihood in (truth.unigram_log_likelihood, truth.log_likelihood)
    )
    return Truth(
        unigram=mean_of(unigram_N, exact.steps_N),
        true=mean_of(true_N, exact.steps_N),
        share=mean_of(100 * (unigram_N - exact.nll_N), unigram_N - true_N),
    )


def rows_of_truth(truth: Truth) -> list[dict[str, Any]]:
    return [
        row("unigram entropy, nats a symbol", truth.unigram),
        row("true entropy, nats a symbol", truth.true),
        row("share of the gap closed, %", truth.share),
    ]


def demo_folder(settings: TrainingSettings) -> Path:
    if settings.source.data_dir is not None:
        return Path(settings.source.data_dir)
    cache = Path(settings.cache.cache_dir) if settings.cache.cache_dir else default_cache_dir()
    return write_demo(cache.expanduser() / "demo", "tokens")


def rows_without_latent(exact: SequenceNLL, without: SequenceNLL) -> list[dict[str, Any]]:
    difference_N = differences_to(exact, without)
    relative = mean_of(100 * difference_N, np.abs(without.nll_N))
    return [
        row("NLL of the decoder without a latent", without.per_sequence, "nats a sequence, the same sequences"),
        row("IW-NLL minus that", mean_of(difference_N), f"{relative.value:+.2f} % (± {relative.error:.2f})"),
    ]


def row(name: str, value: Estimate | float, of: str = "") -> dict[str, Any]:
    if isinstance(value, Estimate):
        return {"figure": name, "value": round(value.value, 4), "standard error": round(value.error, 4), "of": of}
    return {"figure": name, "value": round(value, 4), "standard error": "", "of": of}


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
