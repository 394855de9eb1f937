"""One case of damaged data through the commands, as they are called, in this process or in processes of their own.

In: a seed and the number of a case. Out: an `Outcome`, how each pair of commands ended and all that was wrong with it.
"""

import logging
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import seqvae.cli.main
import train_optimized
from benchmarks.reliability.bad_input_cases import Case, make_case
from benchmarks.reliability.bad_input_checks import Ended, check_end, compare_cache
from seqvae.errors import ExitCode, run_command

POLICIES = {
    "refuse": (),
    "leave out": ("--on_bad_files", "skip", "--bad_values", "drop"),
    "missing": ("--bad_values", "missing"),
}
"""What is said of bad files and values; missing: only where values are bad."""
TINY = (
    "--width",
    "8",
    "--depth",
    "1",
    "--heads",
    "1",
    "--latent_size",
    "2",
    "--precision",
    "32-true",
    "--num_workers",
    "0",
)
TRAINING = (*TINY, "--fast_dev_run", "--disable_metrics_monitoring", "--run_name", "run")
COMMANDS: dict[str, tuple[str, Callable[[], int | None], tuple[str, ...]]] = {
    "check": ("seqvae inspect", seqvae.cli.main.main, ("--check_only",)),
    "page": ("seqvae inspect", seqvae.cli.main.main, ("--rows", "5")),
    "train": (train_optimized.PROG, train_optimized.main, TRAINING),
}
DRAWN = ("names",)
"""Families whose samples are drawn: a picture takes ten times as long as the training."""
ROOT = Path(__file__).parent.parent.parent
PROCESS_SECONDS = 180
REFUSED, TRAINED, LEFT_OUT, UNNOTICED, FAILED = (
    "exit 3",
    "trained, all unchanged",
    "trained, the rest left out and counted",
    "damaged without a checksum, unnoticed",
    "failed",
)
ENDS = (REFUSED, TRAINED, LEFT_OUT, UNNOTICED, FAILED)
"""How a case can end under one policy."""

Run = Callable[[str, tuple[str, ...], Path], Ended]
"""Runs one of COMMANDS with some flags in a directory."""


class Outcome(NamedTuple):
    number: int
    family: str
    form: str
    what: str
    ends: dict[str, str]
    """By policy."""
    wrong: list[str]


def run_case(
    seed: int, number: int, scratch: Path, run: "Run | None" = None, policies: Sequence[str] = tuple(POLICIES)
) -> Outcome:
    """Make the data below an empty directory, run everything on them, and say what came of it."""
    case = make_case(seed, number, scratch)
    run = run or in_this_process
    drawn = case.family in DRAWN or run is in_its_own_process
    ends: dict[str, str] = {}
    wrong: list[str] = []
    for policy in policies:
        if policy == "missing" and case.family != "values":
            continue
        with nullcontext() if drawn else patch("seqvae.training.callbacks.previews.write_preview_figure"):
            ends[policy], found = _run_policy(case, policy, POLICIES[policy], scratch, run)
        wrong += [f"{policy}: {one}" for one in found]
        shutil.rmtree(scratch / "out")
    if astray := sorted(path.name for path in scratch.iterdir() if path.name != "data"):
        wrong.append(f"written outside the output directory: {astray}")
    return Outcome(number, case.family, case.form, case.what, ends, wrong)


def _run_policy(case: Case, policy: str, flags: tuple[str, ...], scratch: Path, run: Run) -> tuple[str, list[str]]:
    out = scratch / "out"
    out.mkdir()
    words = (f"--data_dir={case.data_dir}", *case.words, *flags)
    plot = ("--plot_path", "figure.png") if case.family == "names" and policy == "refuse" else ("--no_plot",)
    more = {
        "check": ("--cache_dir", "cache"),
        "page": ("--cache_dir", "cache", *plot),
        "train": ("--cache_dir", "other"),
    }
    ended = {name: run(name, (*words, *more[name]), out) for name in COMMANDS}
    columns = {repr(name) for file in case.files for name in file.table.column_names}
    wrong = [one for end in ended.values() for one in check_end(end, (str(case.root), *columns))]
    codes = {name: end.code for name, end in ended.items()}
    if wrong or len(set(codes.values())) > 1:
        return FAILED, wrong or [f"the commands differ: {codes}"]
    refused = codes["check"] == ExitCode.DATA
    if case.must == "hold" and refused:
        return FAILED, [f"nothing is wrong with these data: {ended['check'].err}"]
    if refused:
        return REFUSED, []
    return _judge_caches(case, policy, out)


def _judge_caches(case: Case, policy: str, out: Path) -> tuple[str, list[str]]:
    """Of data that were taken: whether that is right, and what became of them in the caches of both commands."""
    if case.must == "refuse" and policy == "refuse":
        return FAILED, ["these data are damaged, and were taken"]
    left_out = 0
    for cache in ("cache", "other"):
        [path] = [path for path in (out / cache).iterdir() if path.is_dir()]
        found = compare_cache(path, case.files, "missing" if policy == "missing" else "", case.root)
        if found.wrong:
            return (FAILED, found.wrong) if case.protected else (UNNOTICED, [])
        left_out = found.left_out
    if left_out and policy == "refuse":
        return FAILED, [f"{left_out} sequences are left out, which nobody asked for"]
    return LEFT_OUT if left_out else TRAINED, []


def in_this_process(name: str, words: tuple[str, ...], directory: Path) -> Ended:
    prog, main, own = COMMANDS[name]
    root = logging.getLogger()
    before, handlers, level = (Path.cwd(), sys.argv), root.handlers[:], root.level
    root.handlers[:] = []  # so that the command sets up its own
    os.chdir(directory)
    sys.argv = [*prog.split(), *own, *words]
    try:
        with _captured(directory) as said:
            code = _ended_with(main, prog)
    finally:
        os.chdir(before[0])
        sys.argv = before[1]
        root.handlers[:] = handlers
        root.setLevel(level)
    return Ended(prog, code, said["out"], said["err"], prints_reasons=name == "page")


def in_its_own_process(name: str, words: tuple[str, ...], directory: Path) -> Ended:
    prog, _, own = COMMANDS[name]
    command = [str(ROOT / prog)] if prog.endswith(".py") else ["-m", *prog.split()]
    done = subprocess.run(
        [sys.executable, *command, *own, *words],
        capture_output=True,
        cwd=directory,
        timeout=PROCESS_SECONDS,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    out, err = (text.decode(errors="surrogateescape") for text in (done.stdout, done.stderr))
    return Ended(prog, done.returncode, out, err, prints_reasons=name == "page")


def _ended_with(main: Callable[[], int | None], prog: str) -> int:
    """The exit code that the interpreter would have, which prints what nobody catches, too."""
    try:
        return int(run_command(main, prog))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception:
        traceback.print_exc()
        return 1


@contextmanager
def _captured(directory: Path) -> Iterator[dict[str, str]]:
    """Both outputs, those of libraries included, once the block is left."""
    said: dict[str, str] = {}
    paths = [directory / ".stdout", directory / ".stderr"]
    before, kept = (sys.stdout, sys.stderr), [os.dup(number) for number in (1, 2)]
    sys.stdout, sys.stderr = (
        path.open("w", encoding="utf-8", errors=errors)
        for path, errors in zip(paths, ("strict", "backslashreplace"), strict=True)
    )
    try:
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            os.dup2(stream.fileno(), number)
        yield said
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.close()
        sys.stdout, sys.stderr = before
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)
        said["out"], said["err"] = (path.read_bytes().decode(errors="surrogateescape") for path in paths)
