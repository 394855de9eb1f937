"""How well latents predict a label that training never saw: train without it, then probe linearly, beside simple summaries.

    python -m benchmarks.quality.latents --data japanese_vowels
    python -m benchmarks.quality.latents --data physionet2012
    python -m benchmarks.quality.latents --data physionet2012 --evaluate runs/icu   # an existing run of the same settings

Real sets lie below SEQVAE_REAL_DATA. The training is that of `train_optimized.py` with the flags in SETS, the checkpoint its
last, the probe that of `seqvae evaluate --probe`, trained on the training split, scored on the splits that SETS names. Other flags
of `train_optimized.py` are passed on.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.measure import machine, make_parser, print_table, restart_as_commands_run
from seqvae.errors import UsageError, run_command

if TYPE_CHECKING:
    from seqvae.inference.probe import Interval

PROG = "benchmarks.quality.latents"


class Labelled(NamedTuple):
    """A data set with labels."""

    label: str
    label_path: str | None
    splits: tuple[str, ...]
    flags: tuple[str, ...]
    """Flags of the training, for data whose latents hold too little by default."""


SETS = {
    "japanese_vowels": Labelled("label", None, ("test",), ("--aggressive_encoder",)),
    "physionet2012": Labelled("in_hospital_mortality", "outcomes.csv", ("valid", "test"), ()),
}


def main() -> None:
    parser = make_parser(PROG, __doc__)
    parser.add_argument("--data", choices=list(SETS), required=True)
    parser.add_argument("--evaluate", metavar="RUN", help="probe this one, of these data, and train nothing")
    options, words = parser.parse_known_args()
    restart_as_commands_run()
    report = train_and_probe(options.data, options.evaluate, words)
    print_table(f"{options.data}: {report['what']}", report["rows"])
    print(json.dumps(report))


def train_and_probe(name: str, run: str | None, words: list[str]) -> dict[str, Any]:
    from seqvae.config.inference import DataChoices
    from seqvae.inference.model import open_data, open_model
    from seqvae.inference.probe import probe

    folder = os.environ.get("SEQVAE_REAL_DATA")
    if not folder:
        raise UsageError(f"--data {name}: SEQVAE_REAL_DATA does not name the folder of the real data")
    about, place = SETS[name], Path(folder) / name
    directory = Path(run) if run else trained_run(place, [*about.flags, *words])
    trained = open_model(str(directory / "checkpoints" / "last.ckpt"))
    labels = None if about.label_path is None else str(place / about.label_path)
    data = open_data(trained, DataChoices(label_path=labels), about.label)
    found = probe(trained, data, about.label, about.splits)
    return {
        "machine": machine(),
        "data": name,
        "what": f"{about.label}, {found['metric']}, {found['scored_on']:,} sequences of {' and '.join(about.splits)}",
        "training": " ".join(["python train_optimized.py --data_dir", name, *about.flags, *words]),
        "rows": [
            *(row(name, found["metric"], one["features"], one["score"], "") for one in found["rows"]),
            *(row(name, found["metric"], one["of"], one["score"], "+") for one in found["differences"]),
        ],
    }


def trained_run(data_dir: Path, words: list[str]) -> Path:
    from seqvae.cli.command_line import parse_command_line
    from seqvae.config.training import OptimizedSettings
    from seqvae.training.fit import fit
    from train_optimized import callbacks

    flags = ["--data_dir", str(data_dir), "--fast_detection", *words]
    settings = parse_command_line(OptimizedSettings, flags, prog=PROG, description="")
    return fit(settings, callbacks(settings)).directory


def row(data: str, metric: str, name: str, score: "Interval", sign: str) -> dict[str, str]:
    """Return a row of the table; the sign of a difference is always written."""
    value, low, high = (f"{number:{sign}.4f}" for number in (score.value, score.low, score.high))
    return {"data": data, "features": name, "score": f"{metric} {value}", "95 %": f"{low} to {high}"}


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
