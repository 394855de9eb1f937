"""Run cases of damaged data through the commands, as they are called, and check how they end.

In: a seed and the numbers of cases. Out: an `Outcome` of each: how the commands ended under each policy for bad files and values,
and a sentence for each thing that is wrong: with an exit code, with a message, or with what stands in the cache afterwards. Cases
run in long-lived processes, because starting one takes longer than a case; those are killed when a case hangs.
"""

import importlib
import logging
import math
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

import seqvae.cli.main
import train_optimized
from benchmarks.reliability.bad_input_cases import Case, make_case
from benchmarks.reliability.bad_input_data import File, Value
from seqvae.config.data import LengthSettings
from seqvae.data.batch import EventBatch, TokenBatch, VectorBatch
from seqvae.data.cache import SequenceData, open_cache
from seqvae.data.dataset import SequenceSet, read_meta
from seqvae.data.description import UNKNOWN
from seqvae.errors import ExitCode, run_command

POLICIES = {
    "refuse": (),
    "leave out": ("--on_bad_files", "skip", "--bad_values", "drop"),
    "missing": ("--bad_values", "missing"),
}
"""Flags for bad files and values; `missing` is tried only where values are bad."""
TINY = "--width 8 --depth 1 --heads 1 --latent_size 2 --precision 32-true --num_workers 0"
TRAINING = (*TINY.split(), "--fast_dev_run", "--disable_metrics_monitoring", "--run_name", "run")
COMMANDS: dict[str, tuple[str, Callable[[], int | None], tuple[str, ...]]] = {
    "check": ("seqvae inspect", seqvae.cli.main.main, ("--check_only",)),
    "page": ("seqvae inspect", seqvae.cli.main.main, ("--rows", "5")),
    "train": (train_optimized.PROG, train_optimized.main, TRAINING),
}
DRAWN = ("names",)
"""Families of which samples are drawn: a picture takes ten times as long as the training."""
ROOT = Path(__file__).parent.parent.parent
PROCESS_SECONDS = 180
REFUSED = "exit 3"
TRAINED = "trained, all unchanged"
LEFT_OUT = "trained, the rest left out and counted"
UNNOTICED = "damaged without a checksum, unnoticed"
FAILED = "failed"
ENDS = (REFUSED, TRAINED, LEFT_OUT, UNNOTICED, FAILED)
"""The ends of a case under one policy."""

FORGED = "forged"
"""The word behind a line break in hostile names, with which no line of an output may begin."""
COUNTED = re.compile(r"([\d,]+) sequences? left out \(--bad_values drop\)")
NOT_READY = "NOT READY to train"

MOST_MEMORY = 12 << 30
"""Bytes of a worker's address space: a request for terabytes is refused, and the machine goes on."""
LOST = "hung or died"
"""The family of a case whose process is gone, and with it the name of its family."""


class Ended(NamedTuple):
    """A command that has ended."""

    prog: str
    code: int
    out: str
    err: str
    prints_reasons: bool = False
    """Whether a page on stdout says why data are refused, in place of a message on stderr."""


class Compared(NamedTuple):
    """A cache beside what the data meant."""

    wrong: list[str]
    left_out: int
    """Number of sequences that are not there and were counted, or whose file was."""


class Outcome(NamedTuple):
    """The end of a case."""

    number: int
    family: str
    form: str
    what: str
    ends: dict[str, str]
    """The end under each policy."""
    wrong: list[str]


Run = Callable[[str, tuple[str, ...], Path], Ended]
"""A function that runs one of COMMANDS with some flags in a directory."""


# --- One case ---------------------------------------------------------------------------------------------------------


def run_case(
    seed: int, number: int, scratch: Path, run: "Run | None" = None, policies: Sequence[str] = tuple(POLICIES)
) -> Outcome:
    """Make the data below an empty directory, and run everything on them."""
    case = make_case(seed, number, scratch)
    run = run or run_in_this_process
    drawn = case.family in DRAWN or run is run_in_own_process
    ends: dict[str, str] = {}
    wrong: list[str] = []
    for policy in policies:
        if policy == "missing" and case.family != "values":
            continue
        (scratch / "out").mkdir()
        with nullcontext() if drawn else patch("seqvae.training.callbacks.previews.write_preview_figure"):
            ends[policy], found = run_policy(case, policy, scratch / "out", run)
        wrong += [f"{policy}: {one}" for one in found]
        shutil.rmtree(scratch / "out")
    if astray := sorted(path.name for path in scratch.iterdir() if path.name != "data"):
        wrong.append(f"written outside the output directory: {astray}")
    return Outcome(number, case.family, case.form, case.what, ends, wrong)


def run_policy(case: Case, policy: str, out: Path, run: Run) -> tuple[str, list[str]]:
    """Run all commands under one policy; return one of ENDS, and what was wrong."""
    words = (f"--data_dir={case.data_dir}", *case.words, *POLICIES[policy])
    plot = ("--plot_path", "figure.png") if case.family == "names" and policy == "refuse" else ()
    own = {
        "check": ("--cache_dir", "cache"),
        "page": ("--cache_dir", "cache", *plot),
        "train": ("--cache_dir", "other"),
    }
    ended = {name: run(name, (*words, *own[name]), out) for name in COMMANDS}
    columns = {repr(name) for file in case.files for name in file.table.column_names}
    wrong = [one for end in ended.values() for one in check_end(end, (str(case.root), *columns))]
    codes = {name: end.code for name, end in ended.items()}
    if wrong or len(set(codes.values())) > 1:
        return FAILED, wrong or [f"the commands differ: {codes}"]
    if codes["check"] == ExitCode.DATA:
        if case.must == "hold":
            return FAILED, [f"nothing is wrong with these data: {ended['check'].err}"]
        return REFUSED, []
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
        return FAILED, [f"{left_out} sequences are left out, which was not requested"]
    return LEFT_OUT if left_out else TRAINED, []


def run_in_this_process(name: str, words: tuple[str, ...], directory: Path) -> Ended:
    prog, main, own = COMMANDS[name]
    root = logging.getLogger()
    before, handlers, level = (Path.cwd(), sys.argv), root.handlers[:], root.level
    root.handlers[:] = []  # so that the command sets up its own
    os.chdir(directory)
    sys.argv = [*prog.split(), *own, *words]
    try:
        with captured(directory) as outputs:
            try:
                code = int(run_command(main, prog))
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            except Exception:  # as the interpreter would end
                traceback.print_exc()
                code = 1
    finally:
        os.chdir(before[0])
        sys.argv = before[1]
        root.handlers[:] = handlers
        root.setLevel(level)
    out, err = outputs
    return Ended(prog, code, out, err, prints_reasons=name == "page")


@contextmanager
def captured(directory: Path) -> Iterator[list[str]]:
    """Capture both outputs, those of libraries included; they are in the list once the block is left."""
    outputs: list[str] = []
    paths = [directory / ".stdout", directory / ".stderr"]
    before, kept = (sys.stdout, sys.stderr), [os.dup(number) for number in (1, 2)]
    sys.stdout = paths[0].open("w", encoding="utf-8", errors="strict")
    sys.stderr = paths[1].open("w", encoding="utf-8", errors="backslashreplace")
    try:
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stderr.fileno(), 2)
        yield outputs
    finally:
        sys.stdout.close()
        sys.stderr.close()
        sys.stdout, sys.stderr = before
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)
        outputs += [path.read_bytes().decode(errors="surrogateescape") for path in paths]


def run_in_own_process(name: str, words: tuple[str, ...], directory: Path) -> Ended:
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


# --- What is wrong with the end of a command, or with a cache ---------------------------------------------------------


def check_end(ended: Ended, names: Sequence[str]) -> list[str]:
    """Return what is wrong with exit code and outputs; an error has to name one of `names`."""
    prog, code, out, err, prints_reasons = ended
    wrong = []
    if "Traceback" in err + out:
        wrong.append(f"{prog}: a traceback ({' '.join(err.strip().splitlines()[-1:])[:200]})")
    if code not in (ExitCode.DONE, ExitCode.DATA):
        wrong.append(f"{prog}: exit code {code} ({err.strip()[-300:]})")
    for stream, text in (("stdout", out), ("stderr", err)):
        if bad := sorted({c for c in text if not c.isprintable() and c != "\n"}):
            wrong.append(f"{prog}: {stream} holds {', '.join(map(ascii, bad))}")
        if any(line.lstrip().startswith(FORGED) for line in text.splitlines()):
            wrong.append(f"{prog}: a name has begun a line of {stream}")
    messages = [line for line in err.splitlines() if line.startswith(f"{prog}: ")]
    if code == ExitCode.DONE:
        return wrong + [f"{prog}: exit code 0 with {message!r}" for message in messages[:1]]
    if prints_reasons:
        message = out if NOT_READY in out else ""
    else:
        message = messages[0] if len(messages) == 1 else ""
    if not message:
        wrong.append(f"{prog}: {len(messages)} messages on stderr where one should stand ({err[-300:]!r})")
    elif not any(name in message.replace("\n    ", " ") for name in names):
        wrong.append(f"{prog}: the message names neither file nor column ({message.strip()[-400:]!r})")
    return wrong


def compare_cache(path: Path, files: Sequence[File], bad_values: str, root: Path) -> Compared:
    """Check that every sequence in a cache is what its file meant, and every other one is accounted for."""
    data = open_cache(path, LengthSettings(max_sequence_length=10**6))
    refused = read_meta(path)["bad_files"]
    used = [file for file in files if not any(reason.startswith(f"{root / file.path}: ") for reason in refused)]
    in_files_left_out = sum(len(file.meant) for file in files if file not in used)
    wrong: list[str] = []
    unaccounted = 0
    for split in ("train", "valid"):
        meant: dict[str, list[Value]] = {}
        for one in (one for file in used if file.split == split for one in file.meant):
            meant.setdefault(str(one.id), []).append(one.if_missing if bad_values == "missing" else one.value)
        for id_, held in held_sequences(data, data.splits[split]):
            values = meant.get(str(id_), [])
            match = next((at for at, value in enumerate(values) if is_same(value, held, data)), None)
            if match is None:
                wrong.append(f"{split}: {id_!r} is {held!r:.300}, which is not what its file meant ({values!r:.300})")
            else:
                values.pop(match)
        unaccounted += sum(len(values) for values in meant.values())
    counted = sum(int(found[1].replace(",", "")) for note in data.notes if (found := COUNTED.match(note)))
    if unaccounted != counted:
        wrong.append(f"{unaccounted} sequences are not in the cache, but {counted} are reported as left out")
    if refused and not any("left out that cannot be used" in note for note in data.notes):
        wrong.append(f"{len(refused)} files are left out, and no note says so")
    return Compared(wrong, in_files_left_out + unaccounted)


def held_sequences(data: SequenceData, split: SequenceSet) -> Iterator[tuple[int | str, Value]]:
    """Yield id and value of each sequence of a split, in its own units."""
    about = data.description
    for number, id_ in enumerate(split.ids(np.arange(len(split)))):
        batch = split.gather(np.array([number]))
        if isinstance(batch, TokenBatch):
            tokens = batch.tokens_BT[0].tolist()
            yield id_, [about.symbols[token] for token in tokens] if about.symbols else tokens
        elif isinstance(batch, VectorBatch):
            own_TD = batch.values_BTD[0].double().numpy() * np.array(about.std) + np.array(about.mean)
            yield id_, np.where(batch.observed_BTD[0].numpy(), own_TD, np.nan).tolist()
        elif isinstance(batch, EventBatch):
            steps: list[tuple[float, dict[str, float]]] = [(gap, {}) for gap in batch.gaps_BT[0].tolist()]
            rows = zip(batch.variables_E, batch.values_E.tolist(), batch.has_value_E, batch.steps_E, strict=True)
            for variable, value, has_value, step in rows:
                own = value * about.std[variable] + about.mean[variable] if has_value else math.nan
                steps[int(step)][1][about.names[variable]] = own
            yield id_, steps


def is_same(meant: Value, held: Value, data: SequenceData) -> bool:
    """Return whether a sequence is what its file meant, as exactly as float32 holds it."""
    if meant is None or len(meant) != len(held):
        return False
    about = data.description
    if about.kind == "tokens":
        known = set(about.symbols)
        return all(
            str(one) == str(other) or (other == UNKNOWN and one not in known)
            for one, other in zip(meant, held, strict=True)
        )
    moments = dict(zip(about.names, zip(about.mean, about.std, strict=True), strict=True))

    def is_close(number: float | None, found: float, name: str) -> bool:
        mean, std = moments[name]
        if number is None or math.isnan(found):
            return number is None and math.isnan(found)
        return abs(found - number) <= 1e-6 * (std + abs(number - mean)) + 1e-12 * abs(mean)

    if about.kind == "vectors":
        return all(
            len(step) == len(found) and all(map(is_close, step, found, about.names))
            for step, found in zip(meant, held, strict=True)
        )
    gaps = np.diff([minute for minute, _ in meant], prepend=meant[0][0])
    return np.allclose(gaps, [gap for gap, _ in held], rtol=1e-6, atol=1e-6) and all(
        step.keys() == found.keys() and all(is_close(number, found[name], name) for name, number in step.items())
        for (_, step), (_, found) in zip(meant, held, strict=True)
    )


# --- Many cases, in long-lived processes ------------------------------------------------------------------------------


class Worker(NamedTuple):
    """A process, the case it works on, and the time it began."""

    process: multiprocessing.process.BaseProcess
    pipe: Connection
    number: int
    since: float

    def run(self, number: int) -> "Worker":
        self.pipe.send(number)
        return self._replace(number=number, since=time.monotonic())

    def outcome(self, limit: float) -> Outcome | None:
        """Return the outcome of the case, or of a process that hung or died; None: it still works on it."""
        if self.pipe.poll():
            try:
                outcome: Outcome = self.pipe.recv()
                return outcome
            except EOFError:
                self.process.join()
                why = f"the process died with {self.process.exitcode}"
        elif time.monotonic() - self.since > limit:
            why = f"the process hung for {limit:g} s"
        else:
            return None
        return Outcome(self.number, LOST, "", "", {"refuse": FAILED}, [why])

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run_in_workers(seed: int, numbers: Sequence[int], workers: int, limit: float) -> Iterator[Outcome]:
    """Yield the outcome of each case, in the order in which they end."""
    left = list(reversed(numbers))
    running = [start_worker(seed, left.pop()) for _ in range(min(workers, len(left)))]
    try:
        while running:
            wait([one.pipe for one in running], timeout=min(1.0, limit))
            for at, one in reversed(list(enumerate(running))):
                outcome = one.outcome(limit)
                if outcome is None:
                    continue
                yield outcome
                if left and outcome.family != LOST:
                    running[at] = one.run(left.pop())
                    continue
                one.stop()
                running[at : at + 1] = [start_worker(seed, left.pop())] if left else []
    finally:
        for one in running:
            one.stop()


def start_worker(seed: int, number: int) -> Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(seed, theirs), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours, number, time.monotonic()).run(number)


def work(seed: int, pipe: Connection) -> None:
    """Run the cases whose numbers come through a pipe, in a process of its own."""
    import resource

    import torch

    importlib.import_module("seqvae.training.fit")  # Lightning keeps the outputs it was imported with: not a case's
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    while True:
        number = pipe.recv()
        with tempfile.TemporaryDirectory() as scratch:
            pipe.send(run_case(seed, number, Path(scratch)))
