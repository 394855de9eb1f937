"""What train_optimized.py reaches: train as it does, measure on the test split, compare with the same decoder without a latent.

    python -m benchmarks.quality.results --data demo
    python -m benchmarks.quality.results --data moses_smiles --free_bits 0.5          # flags of train_optimized.py, for a variant
    python -m benchmarks.quality.results --data physionet2012 --evaluate runs/events-1/checkpoints/last.ckpt

Real sets lie below SEQVAE_REAL_DATA. The comparison trains the decoder alone, with z = 0, for as many steps on the same
batches; its NLL is exact, and its difference to the model's importance-weighted NLL is taken sequence by sequence.
"""

import argparse
import csv
import json
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measure import machine, make_parser, print_table
from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import OptimizedSettings, TrainingSettings
from seqvae.data.batch import Batch, predicted_steps
from seqvae.data.cache import default_cache_dir
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.demo import TokenTruth, read_tokens, read_truth, write_demo
from seqvae.errors import UsageError, run_command
from seqvae.inference.estimates import Estimate, SequenceNLL, importance_weighted_nll, mean_of, posterior_statistics
from seqvae.inference.streaming import batches_of, owners_of, paired_batches
from seqvae.models.vae import SequenceVAE, VAEOutput
from seqvae.training.fit import fit, make_data
from seqvae.training.network import build_network, load_weights, rebuild_network

PROG = "benchmarks.quality.results"
DEMO = "demo"
REAL: dict[str, list[str]] = {"moses_smiles": ["--tokenizer", "characters"], "japanese_vowels": [], "physionet2012": []}
"""The flags that each needs beside --data_dir."""
NAMES = {"moses_smiles": "MOSES", "japanese_vowels": "JapaneseVowels", "physionet2012": "PhysioNet 2012"}


class Options(NamedTuple):
    """The options of this command beside the flags of train_optimized.py."""

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
    """The decoder of a SequenceVAE with z = 0: an autoregressive model of the data, whose NLL is exact."""

    def __init__(self, vae: SequenceVAE, latent_size: int) -> None:
        super().__init__()
        self.vae = vae
        self.latent_size = latent_size

    def forward(self, batch: Batch) -> VAEOutput:
        real_B = batch.lengths_B > 0
        zeros_BZ = torch.zeros(len(real_B), self.latent_size, device=real_B.device)
        nll_B = self.nll_given_z(batch, zeros_BZ)
        return VAEOutput(zeros_BZ, zeros_BZ, real_B, nll_B, predicted_steps(batch))

    def nll_given_z(self, batch: Batch, z: Tensor) -> Tensor:
        return self.vae.nll_given_z(batch, torch.zeros_like(z))


def main() -> None:
    parser = make_parser(PROG, __doc__)
    parser.add_argument("--data", choices=[DEMO, *REAL], required=True)
    parser.add_argument(
        "--evaluate", metavar="CHECKPOINT", help="measure this one, of a run with these data, and train nothing"
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
    found, words = parser.parse_known_args()
    without_latent = found.evaluate is None if found.without_latent is None else found.without_latent
    options = Options(found.data, found.evaluate, without_latent, found.samples, found.sequences, found.bf16)
    flags = []
    if options.data != DEMO:
        folder = os.environ.get("SEQVAE_REAL_DATA")
        if not folder:
            raise UsageError(f"--data {options.data}: SEQVAE_REAL_DATA does not name the folder of the real data")
        flags = ["--data_dir", str(Path(folder) / options.data), *REAL[options.data]]
    settings = parse_command_line(OptimizedSettings, [*flags, *words], prog=PROG, description=__doc__ or "")
    print(json.dumps(run(settings, options)))


def run(settings: TrainingSettings, options: Options) -> dict[str, Any]:
    data = make_data(settings)
    start = time.perf_counter()
    # A run as the command makes it; watching it changes nothing, and is left out.
    checkpoint = Path(options.evaluate) if options.evaluate else last_checkpoint(fit(settings, []).directory)
    training_seconds = time.perf_counter() - start
    network = rebuild_network(checkpoint)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    start = time.perf_counter()
    exact = importance_weighted_nll(network, chosen(data, options), samples=options.samples, autocast=options.autocast)
    exact = exact._replace(owners_N=owners_of(data.split("test"), exact.sequences_N))
    evaluation_seconds = time.perf_counter() - start
    statistics = posterior_statistics(network, paired_batches(data, ["test"]))
    cap, dimensions = math.log(statistics.posteriors), len(statistics.kl_per_dim)
    steps, perplexity = f"{int(exact.steps_N.sum()):,} steps", f"perplexity {exact.perplexity:.4g}"
    rows = [
        row(f"IW-NLL ({options.samples} samples), nats per sequence", exact.per_sequence, sequences(len(exact.nll_N))),
        row("IW-NLL, nats per step", exact.per_step, f"{steps}, {perplexity}"),
        row("ELBO, nats per sequence", statistics.elbo, sequences(statistics.sequences)),
        row("NLL given z", statistics.nll),
        row("rate (KL)", statistics.rate),
        row(
            "mutual information",
            statistics.mutual_information,
            f"{statistics.posteriors:,} posteriors, at most {cap:.2f}",
        ),
        row("active units", statistics.active_units, f"of {dimensions}"),
    ]
    if statistics.decoder_use is not None:
        rows.append(row("decoder use", statistics.decoder_use))
    latent = {
        "set": NAMES.get(options.data, options.data),
        "rate": f"{statistics.rate.value:.2f}",
        "mutual information (cap)": f"{statistics.mutual_information:.2f} ({cap:.2f})",
        "active units": f"{statistics.active_units} of {dimensions}",
        "decoder use": "" if statistics.decoder_use is None else with_error(statistics.decoder_use),
    }
    tables: dict[str, Any] = {"latent": [latent]}
    if data.description.kind == "tokens":
        rows.append(row("perplexity", exact.perplexity))
    if options.data == DEMO and data.description.kind == "tokens":
        truth = compare_with_truth(exact, settings, data)
        rows += [
            row("unigram entropy, nats per symbol", truth.unigram),
            row("true entropy, nats per symbol", truth.true),
            row("share of the gap closed, %", truth.share),
        ]
        tables["truth"] = [
            {
                "unigram entropy": f"{truth.unigram.value:.4f}",
                "true entropy": f"{truth.true.value:.4f}",
                "IW-NLL": f"{exact.per_step.value:.4f}",
                "share of the gap closed, %": f"{truth.share.value:.2f} ± {truth.share.error:.2f}",
            }
        ]
    likelihood = {
        "set": latent["set"],
        "parameters": f"{parameters / 1e6:.2f} M",
        "IW-NLL per sequence": with_error(exact.per_sequence),
        "per step": f"{exact.per_step.value:.3f}",
        "without a latent": "",
        "difference": "",
        "training": "" if options.evaluate else f"{training_seconds:.0f} s, passes: {passes_of(checkpoint)}",
    }
    if options.without_latent:
        without = nll_without_latent(settings, data, options)
        assert np.array_equal(exact.sequences_N, without.sequences_N), "the two were not measured on the same sequences"
        alone, difference_N = without.per_sequence, exact.nll_N - without.nll_N
        relative = mean_of(100 * difference_N, np.abs(without.nll_N), exact.owners_N)
        difference = mean_of(difference_N, owners_N=exact.owners_N)
        likelihood["without a latent"] = f"{alone.value:,.{decimals(alone)}f}"
        likelihood["difference"] = with_error(difference, sign="+")
        rows += [
            row("NLL of the decoder without a latent", alone, "nats per sequence, the same sequences"),
            row("IW-NLL minus that", difference, f"{relative.value:+.2f} % (± {relative.error:.2f})"),
        ]
    print_table(f"{options.data}, test split, {checkpoint}", rows)
    return {
        "benchmark": "results",
        "machine": machine(),
        "data": options.data,
        "parameters": parameters,
        "training_seconds": None if options.evaluate else round(training_seconds, 1),
        "importance_weighting_seconds": round(evaluation_seconds, 1),
        "kl_per_dim": [round(value, 4) for value in statistics.kl_per_dim],
        "rows": rows,
        **tables,
        "likelihood": [likelihood],
    }


def passes_of(checkpoint: Path) -> int:
    """Return the number of epochs that the run began."""
    with (checkpoint.parent.parent / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return 1 + max(int(row["epoch"]) for row in csv.DictReader(file))


def last_checkpoint(run: Path) -> Path:
    return run / "checkpoints" / "last.ckpt"


def chosen(data: SequenceDataModule, options: Options) -> list[Batch]:
    return list(batches_of(data, "test", sequences=options.sequences))


def nll_without_latent(settings: TrainingSettings, data: SequenceDataModule, options: Options) -> SequenceNLL:
    """Train the decoder alone; the latent's own settings have no meaning here, as the KL is 0."""
    model = replace(settings.model, latent_scope="sequence", posterior="gaussian")
    settings = replace(settings, model=model, objective=replace(settings.objective, free_bits=0.0, target_kl=None))
    if settings.run.run_name is not None:
        settings = replace(settings, run=replace(settings.run, run_name=f"{settings.run.run_name}-without-latent"))
    torch.manual_seed(settings.run.seed)
    network = WithoutLatent(build_network(data, model, settings.compute), model.latent_size)
    load_weights(network, last_checkpoint(fit(settings, [], network=network).directory), data.description)
    return importance_weighted_nll(network, chosen(data, options), samples=1, autocast=options.autocast)


class Truth(NamedTuple):
    """Entropies in nats per symbol, and the share of the gap between them that was closed, in percent."""

    unigram: Estimate
    true: Estimate
    share: Estimate


def compare_with_truth(exact: SequenceNLL, settings: TrainingSettings, data: SequenceDataModule) -> Truth:
    """Return the entropies of the very same sequences under the process that made them."""
    cache = Path(settings.cache.cache_dir) if settings.cache.cache_dir else default_cache_dir()
    own = settings.source.data_dir
    folder = Path(own) if own is not None else write_demo(cache.expanduser() / "demo", "tokens")
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


# --- Cells of the tables ----------------------------------------------------------------------------------------------


def sequences(count: int) -> str:
    return f"{count:,} sequences"


def row(name: str, value: Estimate | float, of: str = "") -> dict[str, Any]:
    if isinstance(value, Estimate):
        return {"figure": name, "value": round(value.value, 4), "standard error": round(value.error, 4), "of": of}
    return {"figure": name, "value": round(value, 4), "standard error": "", "of": of}


def with_error(estimate: Estimate, sign: str = "") -> str:
    """Return value and standard error.

    >>> with_error(Estimate(1084.512, 17.92)), with_error(Estimate(0.2, 0.071), sign="+")
    ('1,084.5 ± 17.9', '+0.20 ± 0.07')
    """
    digits = decimals(estimate)
    return f"{estimate.value:{sign},.{digits}f} ± {estimate.error:.{digits}f}"


def decimals(estimate: Estimate) -> int:
    """Return the number of decimals that the standard error leaves a meaning."""
    return 1 if estimate.error >= 10 else 2


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
