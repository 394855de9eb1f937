"""Where and when a model was evaluated, and the row of it in its run's directory.

In: a trained model and the command as typed. Out: the beginning of the record, and one line more in `evaluation.jsonl`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqvae.data.datamodule import SequenceDataModule
from seqvae.exit_codes import harmless
from seqvae.inference.trained import Trained
from seqvae.json_lines import JsonLines
from seqvae.reports.__main__ import write_report
from seqvae.reports.run_files import REPORT, command_line, utc_now

EVALUATION = "evaluation.jsonl"


def place_and_time(trained: Trained, data: SequenceDataModule, argv: Sequence[str]) -> dict[str, Any]:
    source = data.source.data_dir
    return {
        "time": utc_now(),
        "command": command_line(argv),
        "checkpoint": name_of(trained),
        "data": "demo data" if source is None else Path(source).name or source,
    }


def name_of(trained: Trained) -> str:
    """Short, and without the way to it: `mine/best.ckpt`, or of what lies in no run, its file and folder."""
    folder = trained.path.absolute().parent if trained.run is None else trained.run
    return f"{folder.name}/{trained.path.name}"


def append_record(run: Path | None, record: dict[str, Any]) -> None:
    """To the directory of the run, if the checkpoint lies in one, and to its report, if it has one."""
    if run is None or not run.is_dir():
        return
    file = JsonLines(run / EVALUATION)
    file.append(record)
    file.finish()
    if (run / REPORT).is_file():
        _renew_report(run)


def _renew_report(directory: Path) -> None:
    try:
        write_report(directory)
    except OSError as error:
        reason = error.strerror or error
        print(harmless(f"note: {directory / REPORT} cannot be written ({reason}) and is as it was before"), flush=True)
