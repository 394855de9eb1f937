"""Codebooks side by side: learned codes with and without revival, and those of a grid; how many are used, and what they are worth.

    python -m benchmarks.quality.codes --data demo_tokens           # a few minutes for each set
    python -m benchmarks.quality.codes --data japanese_vowels --steps 20

Each is the training of `train_optimized.py` with the flags of its set and its own, in a process of its own. The use of codes is
that of the monitor's last reading, the verdicts are those of the run. The ELBO is that of `seqvae evaluate` on the test split,
first with equally likely codes, as in the training, then by the prior of `seqvae fit-prior`. The real set lies below
SEQVAE_REAL_DATA.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.measure import machine, make_parser, print_table, restart_as_commands_run, run_in_own_process
from benchmarks.quality.variants import monitoring, place_of
from seqvae.errors import run_command

PROG = "benchmarks.quality.codes"
COLLAPSED = "codebook_collapsed"


class CodeData(NamedTuple):
    """A data set: the optimizer steps of each training, and its own flags."""

    steps: int
    flags: tuple[str, ...]


SMALL = ("--width", "32", "--depth", "1", "--precision", "32-true", "--gradient_accumulation_steps", "1")
SETS = {
    "demo_tokens": CodeData(300, ("--kind", "tokens", *SMALL)),
    "japanese_vowels": CodeData(300, ("--latent_scope", "step", *SMALL)),
}
CODEBOOKS: dict[str, tuple[str, ...]] = {
    "vq, no revival": ("--codebook", "vq", "--no_revive_codes"),
    "vq": ("--codebook", "vq"),
    "fsq": ("--codebook", "fsq"),
}


def main() -> None:
    parser = make_parser(PROG, __doc__)
    parser.add_argument("--data", choices=list(SETS), required=True)
    parser.add_argument("--steps", type=int, help="optimizer steps in place of those of the set")
    parser.add_argument("--one", choices=list(CODEBOOKS), help="train and measure one, and print it")
    options = parser.parse_args()
    restart_as_commands_run()
    steps = options.steps or SETS[options.data].steps
    if options.one:
        print(json.dumps(measure(options.data, options.one, steps)))
        return
    words = ("--data", options.data, "--steps", str(steps), "--one")
    rows = [row_of(options.data, run_in_own_process(PROG, *words, name)) for name in CODEBOOKS]
    print_table(f"{options.data}, {steps} steps", rows)
    report = {"benchmark": "codes", "machine": machine(), "data": options.data, "steps": steps, "rows": rows}
    print(json.dumps(report))


def flags_of(data: str, name: str, steps: int) -> list[str]:
    """Return the flags of a training, but for where its directory is."""
    return ["--latent", "discrete", *SETS[data].flags, *CODEBOOKS[name], "--max_steps", str(steps), "--fast_detection"]


def measure(data: str, name: str, steps: int) -> dict[str, Any]:
    """Train in a directory that is gone afterwards, evaluate, fit a prior, and evaluate again."""
    from benchmarks.quality.results import last_checkpoint
    from seqvae.cli.command_line import parse_command_line
    from seqvae.config.inference import DataChoices, EvaluateSettings, PriorSettings
    from seqvae.config.training import OptimizedSettings
    from seqvae.files import read_rows
    from seqvae.inference.evaluate import evaluate
    from seqvae.inference.model import Model, open_data, open_model
    from seqvae.inference.prior_fitting import fit_prior
    from seqvae.monitors import read_readings
    from seqvae.training.fit import fit

    with tempfile.TemporaryDirectory(prefix="seqvae-codes-") as temporary:
        flags = [*place_of(data), *flags_of(data, name, steps), "--output_dir", temporary]
        settings = parse_command_line(OptimizedSettings, flags, prog=PROG, description="")
        start = time.process_time()  # of all threads, so that other work on the machine counts little
        run = fit(settings, monitoring(settings)).directory
        seconds = time.process_time() - start
        reading = read_readings(run / "posterior.jsonl")[-1]
        verdicts = [row for row in read_rows(run / "events.jsonl") if row["event"] == "verdict"]
        even = open_model(str(last_checkpoint(run)))
        opened = open_data(even, DataChoices())

        def elbo_of(model: Model) -> float:
            record, _ = evaluate(model, opened, ["test"], EvaluateSettings(iw_sequences=0), seed=0)
            return next(float(row["value"]) for row in record["rows"] if row["name"] == "ELBO")

        start = time.process_time()
        fitted, _ = fit_prior(even, opened, PriorSettings(), seed=0)
        prior_seconds = time.process_time() - start
        return {
            "name": name,
            "in_use": reading.codes_in_use,
            "perplexity": reading.code_perplexity,
            "dead": reading.dead_codes,
            "codes": (reading.codebook_size or 0) * (reading.codebooks or 0),
            "verdicts": [{"step": row["step"], "verdict": row["verdict"]} for row in verdicts],
            "elbo": elbo_of(even),
            "elbo_by_prior": elbo_of(fitted),
            "seconds": seconds,
            "prior_seconds": prior_seconds,
        }


def row_of(data: str, found: Mapping[str, Any]) -> dict[str, str]:
    """Return the row of a training in the table."""
    return {
        "set": data,
        "codebook": found["name"],
        "codes in use, %": f"{100 * found['in_use']:.1f}",
        "perplexity": f"{found['perplexity']:.0f} of {found['codes']}",
        "dead codes": str(found["dead"]),
        "collapse called at step": called_at(found["verdicts"]),
        "last verdict": found["verdicts"][-1]["verdict"] if found["verdicts"] else "",
        "ELBO": f"{found['elbo']:.2f}",
        "ELBO, fitted prior": f"{found['elbo_by_prior']:.2f}",
        "CPU seconds": f"{found['seconds']:.0f}",
        "of the prior": f"{found['prior_seconds']:.0f}",
    }


def called_at(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """Return the step at which a codebook was first called collapsed, or that it never was.

    >>> called_at([{"step": 7, "verdict": "healthy"}, {"step": 9, "verdict": "codebook_collapsed"}]), called_at([])
    ('9', 'never')
    """
    return next((str(row["step"]) for row in verdicts if row["verdict"] == COLLAPSED), "never")


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
