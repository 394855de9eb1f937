"""Every prior, posterior, code and remedy against the default, at equal steps: likelihood, use of the latent, probe, CPU seconds.

    python -m benchmarks.quality.variants --data japanese_vowels               # 15 minutes to an hour for each set
    python -m benchmarks.quality.variants --data demo_tokens --only default flow --seeds 2

Real sets lie below SEQVAE_REAL_DATA. Each variant is the training of `train_optimized.py` with the flags in VARIANTS, for the steps
in SETS, in a process of its own; what is measured is `seqvae evaluate` of its last checkpoint on the test split. Differences of the
NLL are taken sequence by sequence. What was measured lies in runs/variants/ and is not measured again until the code changes.
"""

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measure import (
    code_version,
    known_figures,
    machine,
    make_parser,
    print_table,
    restart_as_commands_run,
    run_in_own_process,
)
from seqvae.errors import UsageError, run_command
from seqvae.text import clip

PROG = "benchmarks.quality.variants"
DEFAULT_DIRECTORY = Path("runs/variants")
DEFAULT = "default"
WITHOUT_LATENT = "no latent"
SEQUENCES, SAMPLES = 400, 100
"""Of the test split, and of z for each of them: what the NLL is measured on."""


class DataSet(NamedTuple):
    """A data set: the optimizer steps of each variant, its own flags, and the label of its probe."""

    steps: int
    flags: tuple[str, ...] = ()
    label: str | None = None
    label_path: str | None = None


SETS = {
    "demo_tokens": DataSet(200, ("--kind", "tokens")),
    "demo_vectors": DataSet(200, ("--kind", "vectors")),
    "demo_events": DataSet(200, ("--kind", "events")),
    "moses_smiles": DataSet(400, ("--tokenizer", "characters")),
    "japanese_vowels": DataSet(1950, label="label"),
    "physionet2012": DataSet(300, label="in_hospital_mortality", label_path="outcomes.csv"),
}

VARIANTS: dict[str, tuple[str, ...]] = {
    DEFAULT: (),
    "prior mixture": ("--prior", "mixture"),
    "prior vamp": ("--prior", "vamp"),
    "posterior batch_norm": ("--posterior", "batch_norm"),
    "posterior flow": ("--posterior", "flow"),
    "posterior du": ("--posterior", "du"),
    "flow and vamp": ("--posterior", "flow", "--prior", "vamp"),
    "codes vq": ("--latent", "discrete", "--codebook", "vq", "--codebooks", "4"),
    "codes fsq": ("--latent", "discrete", "--codebook", "fsq", "--codebooks", "4"),
    "latent per step": ("--latent_scope", "step"),
    "latent per step, autoregressive prior": ("--latent_scope", "step", "--prior", "autoregressive"),
    "two levels": ("--latent_scope", "both"),
    "aggressive encoder": ("--aggressive_encoder",),
    "autoencoder first": ("--pretrain_autoencoder", "{fifth}"),
    "autoencoder first, decoder reset": ("--pretrain_autoencoder", "{fifth}", "--reset_decoder"),
    "contrastive": ("--contrastive_weight", "1"),
    "pooling max": ("--pooling", "max"),
    "pooling last": ("--pooling", "last"),
    "free bits in total": ("--free_bits_by", "total"),
    "free bits by group": ("--free_bits_by", "group", "--free_bits_group", "4"),
    "free bits 0": ("--free_bits", "0"),
    "free bits 0.25": ("--free_bits", "0.25"),
    "weight 0.5": ("--beta", "0.5"),
    "word dropout 0.2": ("--word_dropout", "0.2"),
    "dropout 0": ("--dropout", "0"),
    "dropout 0, aggressive encoder": ("--dropout", "0", "--aggressive_encoder"),
    "dropout 0, vamp": ("--dropout", "0", "--prior", "vamp"),
    "dropout 0, autoencoder first": ("--dropout", "0", "--pretrain_autoencoder", "{fifth}"),
    "muon": ("--optimizer", "muon"),
    "ema": ("--ema", "0.99"),
    "muon and ema": ("--optimizer", "muon", "--ema", "0.99"),
    WITHOUT_LATENT: (),
}


def main() -> None:
    parser = make_parser(PROG, __doc__)
    parser.add_argument("--data", choices=list(SETS), required=True)
    parser.add_argument("--only", metavar="NAME", nargs="+", default=list(VARIANTS), help="only these variants")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each variant")
    parser.add_argument("--steps", type=int, help="optimizer steps in place of those of the set")
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY, help="where runs and figures are kept")
    parser.add_argument("--any_version", action="store_true", help="take figures of older code, too")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SEED"), help="train and measure one, and print it")
    options = parser.parse_args()
    restart_as_commands_run()
    if unknown := [name for name in options.only if name not in VARIANTS]:
        raise UsageError(f"--only: there is no variant {', '.join(unknown)}. Choose from: {', '.join(VARIANTS)}.")
    steps = options.steps or SETS[options.data].steps
    if options.one:
        print(json.dumps(measure(options.data, options.one[0], int(options.one[1]), steps)))
        return
    found = measure_all(options.data, options.only, options.seeds, steps, options.directory, options.any_version)
    rows = [{"set": options.data, **row} for row in table(found)]
    print_table(f"{options.data}, {steps} steps, test split", rows)
    report = {"benchmark": "variants", "machine": machine(), "data": options.data, "steps": steps, "rows": rows}
    print(json.dumps(report))


def measure_all(
    data: str, names: Sequence[str], seeds: int, steps: int, directory: Path, any_version: bool
) -> list[dict[str, Any]]:
    """Return what is known of each variant and seed, in the order of VARIANTS; measure what is not."""
    path, version = directory / "figures.jsonl", code_version("benchmarks/quality/variants.py")
    known = known_figures(path, data, steps, None if any_version else version)
    for seed in range(seeds):
        for name in VARIANTS:
            if name not in names or (name, seed) in known:
                continue
            words = ("--data", data, "--steps", str(steps), "--one", name, str(seed))
            try:
                row = run_in_own_process(PROG, *words) | {"version": version}
            except RuntimeError as error:  # a combination that is refused, or a run that was ended
                print(f"{name}: left out ({clip(str(error).strip().splitlines()[-1], 200)})", flush=True)
                continue
            known[name, seed] = row
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{data}: {name}, seed {seed}: {row['seconds']:.0f} s, NLL {np.mean(row['nll_N']):.2f}", flush=True)
    return [known[name, seed] for name in VARIANTS for seed in range(seeds) if (name, seed) in known and name in names]


def measure(data: str, name: str, seed: int, steps: int) -> dict[str, Any]:
    """Train a variant in a directory that is gone afterwards, and evaluate it."""
    from benchmarks.quality.results import Options, last_checkpoint, nll_without_latent
    from seqvae.cli.command_line import parse_command_line
    from seqvae.config.inference import DataChoices, EvaluateSettings
    from seqvae.config.training import OptimizedSettings
    from seqvae.inference.evaluate import evaluate
    from seqvae.inference.model import open_data, open_model
    from seqvae.training.fit import fit, make_data

    about = SETS[data]
    with tempfile.TemporaryDirectory(prefix="seqvae-variant-") as temporary:
        flags = [*place_of(data), *about.flags, *(word.format(fifth=steps // 5) for word in VARIANTS[name])]
        flags += ["--max_steps", str(steps), "--seed", str(seed), "--output_dir", temporary, "--fast_detection"]
        settings = parse_command_line(OptimizedSettings, flags, prog=PROG, description="")
        choices = EvaluateSettings(iw_samples=SAMPLES, iw_sequences=SEQUENCES)
        start = time.process_time()  # of all threads, so that other work on the machine counts little
        if name == WITHOUT_LATENT:
            nll = nll_without_latent(settings, make_data(settings), Options(data, None, True, 1, SEQUENCES))
            found = {"nll_N": nll.nll_N, "sequences_N": nll.sequences_N}
            return finished(data, name, seed, steps, time.process_time() - start, found, {})
        run = fit(settings, monitoring(settings)).directory
        seconds = time.process_time() - start
        model = open_model(str(last_checkpoint(run)))
        labels = None if about.label_path is None else str(real_data() / data / about.label_path)
        opened = open_data(model, DataChoices(label_path=labels), about.label)
        record, weighted = evaluate(model, opened, ["test"], choices, seed=0)
        values = {row["name"]: row["value"] for row in record["rows"]}
        if about.label is not None:
            from seqvae.inference.probe import probe

            values["probe"] = probe(model, opened, about.label, ["test"])["rows"][0]["score"].value
        assert weighted is not None
        nll = weighted.nll
        return finished(data, name, seed, steps, seconds, {"nll_N": nll.nll_N, "sequences_N": nll.sequences_N}, values)


def monitoring(settings: Any) -> list[Any]:
    """Return the callbacks of `train_optimized.py`: some remedies are led by the monitor."""
    from train_optimized import callbacks

    made: list[Any] = callbacks(settings)
    return made


def finished(
    data: str,
    name: str,
    seed: int,
    steps: int,
    seconds: float,
    arrays: Mapping[str, np.ndarray],
    values: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a row of figures.jsonl."""
    order = np.argsort(arrays["sequences_N"])
    return {
        "data": data,
        "name": name,
        "seed": seed,
        "steps": steps,
        "seconds": round(seconds, 1),
        "sequences_N": arrays["sequences_N"][order].tolist(),
        "nll_N": [round(float(value), 3) for value in arrays["nll_N"][order]],
        "values": {key: value for key, value in values.items() if isinstance(value, int | float)},
    }


def place_of(data: str) -> list[str]:
    return ["--data_dir", str(real_data() / data)] if not data.startswith("demo") else []


def real_data() -> Path:
    folder = os.environ.get("SEQVAE_REAL_DATA")
    if not folder:
        raise UsageError("SEQVAE_REAL_DATA does not name the folder of the real data")
    return Path(folder)


def table(found: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return a row for each variant: means over its seeds; the difference to the default is that of the same seeds."""
    by_name: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in found:
        by_name.setdefault(row["name"], {})[row["seed"]] = row
    rows = []
    for name, runs in by_name.items():
        values = [run["values"] for run in runs.values()]

        def mean(key: str, digits: int = 2, values: Sequence[Mapping[str, float]] = values) -> str:
            known = [one[key] for one in values if not math.isnan(one.get(key, math.nan))]
            return f"{np.mean(known):.{digits}f}" if known else ""

        nll = np.mean([np.mean(run["nll_N"]) for run in runs.values()])
        rows.append(
            {
                "variant": name,
                "flags": " ".join(VARIANTS[name]).replace("{fifth}", "STEPS"),
                "seeds": str(len(runs)),
                "IW-NLL": f"{nll:.2f}",
                "against the default": "" if name == DEFAULT else difference(runs, by_name.get(DEFAULT, {})),
                "rate": mean("rate"),
                "mutual information": mean("mutual information"),
                "active units": mean("active units", 0),
                "decoder use": mean("decoder use"),
                "probe": mean("probe", 3),
                "CPU seconds": f"{np.mean([run['seconds'] for run in runs.values()]):.0f}",
            }
        )
    return rows


def difference(runs: Mapping[int, Mapping[str, Any]], others: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the mean difference of the NLL, sequence by sequence, with its standard error over sequences and seeds."""
    per_seed = []
    for seed in sorted(runs.keys() & others.keys()):
        one, other = runs[seed], others[seed]
        if one["sequences_N"] != other["sequences_N"]:
            return ""
        per_seed.append(np.array(one["nll_N"]) - np.array(other["nll_N"]))
    if not per_seed:
        return ""
    of_sequences = np.mean(per_seed, axis=0)
    error = float(of_sequences.std(ddof=1) / math.sqrt(len(of_sequences)))
    if len(per_seed) > 1:
        error = math.hypot(error, float(np.std([one.mean() for one in per_seed], ddof=1) / math.sqrt(len(per_seed))))
    return f"{of_sequences.mean():+.2f} ± {error:.2f}"


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
