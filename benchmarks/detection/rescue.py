"""What does a rescue heal, and what does it cost? The runs of the zoo that die, each beside itself with --on_collapse rescue.

    python -m benchmarks.detection.rescue --zoo runs/zoo                    # records: benchmarks.detection.collapse_zoo --record
    python -m benchmarks.detection.rescue --zoo runs/zoo --only weight-4 --shard 1/2

Each run that is dead in truth, and whose network is whole, is trained again twice with the product's own `fit`: left alone, and
rescued; one whose row is in DIR/rows is kept. At the end both are measured on held-out sequences (information and decoder use), and
by their validation ELBO at weight 1 on all validation sequences. A run is alive where information and decoder use are above the
lines that a rescue goes by (`seqvae/training/rescue.py`).
"""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.detection.collapse_zoo import choose, known_runs, shard_of
from benchmarks.detection.zoo_recording import SEQUENCES, quiet_worker, settings_of, train
from benchmarks.detection.zoo_runs import HALVES, ZooRun
from benchmarks.measure import machine, make_parser, print_table
from seqvae.config.monitoring import OPTIMIZED_WATCH
from seqvae.errors import UsageError, run_command
from seqvae.files import read_rows
from seqvae.inference.estimates import posterior_statistics
from seqvae.inference.streaming import paired_batches
from seqvae.monitors import PosteriorMetricsMonitor
from seqvae.monitors.rules import OF_SEQUENCES, OF_STEPS
from seqvae.training.callbacks.rescue import Rescue
from seqvae.training.fit import make_data
from seqvae.training.network import build_network

PROG = "benchmarks.detection.rescue"
DEAD = {"collapsed", "decoder_ignores_z"}


class Ended(NamedTuple):
    """A run that has ended."""

    mutual_information: float
    decoder_use: float
    decoder_use_error: float
    rate: float
    valid_elbo: float
    valid_nll: float
    steps: int
    courses: list[str]
    """Of the moves of its rescues."""
    verdict: str

    def is_alive(self, per_step: bool) -> bool:
        lines = OF_STEPS if per_step else OF_SEQUENCES
        is_used = self.decoder_use > max(lines.clear_use, lines.clear_use_errors * self.decoder_use_error)
        return self.mutual_information > lines.clear_information and is_used


def main() -> None:
    parser = make_parser(PROG, __doc__)
    parser.add_argument("--zoo", metavar="DIR", required=True, help="records of the zoo, which tell what dies")
    parser.add_argument("--directory", default="runs/rescue", help="of runs, data and caches")
    parser.add_argument("--half", choices=HALVES, help="only this half of the runs")
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[], help="only runs whose names begin with these")
    parser.add_argument("--shard", metavar="I/N", help="only the I-th of N parts of these runs")
    options = parser.parse_args()
    known = known_runs(shard_of(choose(options.only, options.half), options.shard), Path(options.zoo).resolve())
    runs = [
        one.run for one in known if set(one.truth.right) <= DEAD and one.truth.right and one.run.alteration == "none"
    ]
    if not runs:
        raise UsageError(f"--zoo {options.zoo}: none of these runs is dead")
    quiet_worker()
    rows = []
    for run in runs:
        rows.append(compare(run, Path(options.directory).resolve()))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print_table("Runs that die, left alone and rescued", rows)
    died = [row for row in rows if row["left alone"] == "dead"]
    short = {
        "died": len(died),
        "called": sum(bool(row["courses"]) for row in died),
        "healed": sum(row["rescued"] == "alive" for row in died),
        "steps more, at most %": max((row["steps more %"] for row in died), default=None),
        "ELBO lost, at most % of the NLL": max((row["ELBO lost % of NLL"] for row in died), default=None),
    }
    print_table("In short", [short])
    print(json.dumps({"benchmark": "rescue", "machine": machine(), "runs": rows, "in_short": [short]}))


def compare(run: ZooRun, directory: Path) -> dict[str, Any]:
    """Train a run twice, unless its row is kept in the directory; return the row."""
    kept = directory / "rows" / f"{run.name}.json"
    if kept.exists():
        row: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        return row
    dead, rescued = (trained(run, directory, is_rescued=is_rescued) for is_rescued in (False, True))
    per_step = "--latent_scope" in run.words
    row = {
        "run": run.name,
        "left alone": "alive" if dead.is_alive(per_step) else "dead",
        "rescued": "alive" if rescued.is_alive(per_step) else "dead",
        "information": round(rescued.mutual_information, 2),
        "decoder use": f"{rescued.decoder_use:.2f} ± {rescued.decoder_use_error:.2f}",
        "rate": round(rescued.rate, 2),
        "steps more %": round(100 * (rescued.steps - dead.steps) / dead.steps, 1),
        "ELBO left alone": round(dead.valid_elbo, 2),
        "ELBO rescued": round(rescued.valid_elbo, 2),
        "ELBO lost % of NLL": round(100 * (dead.valid_elbo - rescued.valid_elbo) / abs(dead.valid_nll), 2),
        "courses": " ".join(rescued.courses),
        "verdicts": f"{dead.verdict}, {rescued.verdict}",
    }
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(row), encoding="utf-8")
    return row


def trained(run: ZooRun, directory: Path, *, is_rescued: bool) -> Ended:
    """Train from the beginning and measure."""
    name = f"{run.name}.{'rescued' if is_rescued else 'alone'}"
    settings = settings_of(run.words, run.data, directory, name)
    settings = replace(settings, run=replace(settings.run, log_every_n_steps=run.steps))
    data = make_data(settings)
    torch.manual_seed(settings.run.seed)
    network = build_network(data, settings.model, settings.compute)
    monitor = PosteriorMetricsMonitor(**OPTIMIZED_WATCH.monitor_arguments() | {"plot_frequency": None})
    folder = Path(settings.run.output_dir, name)
    train(settings, folder, network, [monitor, Rescue(monitor)] if is_rescued else [monitor])
    events = read_rows(folder / "events.jsonl")
    finished = next(row for row in events if row["event"] == "finished")
    found = posterior_statistics(network.eval(), paired_batches(data, ["test"], sequences=SEQUENCES))
    assert found.decoder_use is not None
    shutil.rmtree(folder / "checkpoints")
    return Ended(
        found.mutual_information,
        found.decoder_use.value,
        found.decoder_use.error,
        found.rate.value,
        finished["valid_elbo"],
        -finished["valid_elbo"] - finished["valid_kl"],
        finished["step"],
        [row["course"] for row in events if row["event"] == "rescue"],
        monitor.verdict.name,
    )


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
