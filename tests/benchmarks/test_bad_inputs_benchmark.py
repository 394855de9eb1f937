"""The benchmark of damaged data: the same seed gives the same cases, they end as they must, and a wrong end is seen."""

import hashlib
import json
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from benchmarks.reliability import bad_input_runs, bad_inputs
from benchmarks.reliability.bad_input_cases import DAMAGES, ROUND, VARIED, make_case, variant_of_turn
from benchmarks.reliability.bad_input_data import FORMS, File, make_files, unchanged
from benchmarks.reliability.bad_input_runs import FAILED, Ended, Outcome, Worker, check_end, compare_cache, run_case
from seqvae.config.data import CacheSettings, SourceSettings
from seqvae.data.cache import prepare_cache
from tests.support.parquet_files import write

DOZEN = (0, 1, 3, 5, 6, 12, 14, 22, 24, 41, 44, 57)
"""Of all families, forms and ends; most are refused, which is quick."""
REFUSAL = Ended("prog", 3, "", "prog: /d/a.parquet: is empty.\n")


def digest(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("number", range(len(ROUND)))
def test_a_case_is_the_same_for_the_same_seed_and_another_for_another(tmp_path, number):
    cases = [make_case(seed, number, tmp_path / str(at)) for at, seed in enumerate((0, 0, 1))]
    first, again, other = (digest(tmp_path / str(at)) for at in range(3))
    assert first == again
    assert (cases[0].what, cases[0].form) == (cases[1].what, cases[1].form)
    assert first != other


def test_a_round_has_every_family_and_eight_rounds_have_every_form():
    assert set(ROUND) == {*DAMAGES, *VARIED}
    for family in VARIED:
        assert {variant_of_turn(family, 0, turn)[0] for turn in range(200)} == set(FORMS)


@pytest.mark.parametrize("family", VARIED)
def test_no_variant_comes_twice_before_all_have_come(family):
    number = sum(len(VARIED[family](form)) for form in FORMS)
    drawn = [variant_of_turn(family, 3, turn) for turn in range(number)]
    assert len({(form, variant.what) for form, variant in drawn}) == number


@pytest.mark.parametrize("number", DOZEN)
def test_a_dozen_cases_come_to_a_right_end(tmp_path, number):
    assert run_case(0, number, tmp_path, policies=("refuse",)).wrong == []


@pytest.mark.slow
def test_sixty_cases_of_another_seed_come_to_a_right_end():
    outcomes = list(bad_input_runs.run_in_workers(7, range(64), workers=1, limit=120))
    assert {one.number: one.wrong for one in outcomes if one.wrong} == {}
    assert sorted(one.number for one in outcomes) == list(range(64))


def test_a_clear_refusal_is_a_right_end():
    assert check_end(REFUSAL, ["/d"]) == []


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (
            REFUSAL._replace(err="Traceback (most recent call last):\nKeyError: 'x'\n", code=1),
            "a traceback (KeyError: 'x')",
        ),
        (REFUSAL._replace(code=1), "exit code 1"),
        (REFUSAL._replace(code=2), "exit code 2"),
        (REFUSAL._replace(code=5), "exit code 5"),
        (REFUSAL._replace(code=-11), "exit code -11"),
        (REFUSAL._replace(err="prog: /d/\x1b[2J.parquet: is empty.\n"), "stderr holds '\\x1b'"),
        (REFUSAL._replace(out="a\u202eb"), "stdout holds '\\u202e'"),
        (REFUSAL._replace(out="a\rb"), "stdout holds '\\r'"),
        (REFUSAL._replace(err="prog: /d/a\nforged line\n"), "a name has begun a line of stderr"),
        (REFUSAL._replace(err=""), "0 messages on stderr"),
        (REFUSAL._replace(err=REFUSAL.err * 2), "2 messages on stderr"),
        (REFUSAL._replace(err="prog: something is wrong\n"), "names neither file nor column"),
        (REFUSAL._replace(code=0), "exit code 0 with 'prog: /d/a.parquet"),
        (REFUSAL._replace(prints_reasons=True), "messages on stderr where one should stand"),
    ],
)
def test_a_wrong_end_is_seen(ended, expected):
    wrong = check_end(ended, ["/d"])
    assert len([one for one in wrong if expected in one]) == 1, wrong


def built(directory: Path, form: str, files: Sequence[File]) -> Path:
    for file in files:
        write(directory / file.path, file.table)
    source = SourceSettings(data_dir=str(directory), tokenizer="characters" if form == "text" else None)
    return prepare_cache(source, CacheSettings(cache_dir=str(directory.with_name("cache"))))


@pytest.mark.parametrize("form", FORMS)
def test_a_cache_of_whole_files_holds_what_they_mean_and_any_changed_value_is_seen(tmp_path, form):
    files = make_files(form, np.random.default_rng(0))
    cache = built(tmp_path / "d", form, files)
    assert compare_cache(cache, files, "", tmp_path / "d") == ([], 0)
    first = files[0].meant[0]
    files[0].meant[0] = unchanged(first.id, changed(form, first.value))
    wrong = compare_cache(cache, files, "", tmp_path / "d").wrong
    assert any(f"{first.id!r} is " in one and "not what its file meant" in one for one in wrong), wrong


def changed(form: str, value: list) -> list | str:
    """Return the value with the smallest change of one number, or of one letter."""
    if form == "tokens":
        return [*value[:-1], value[-1] + 1]
    if form == "text":
        return f"{value[:-1]}{'a' if value[-1] != 'a' else 'b'}"
    if form in ("nested", "fixed", "table"):
        return [*value[:-1], [value[-1][0], value[-1][1] + 0.125]]
    minute, step = value[-1]
    return [*value[:-1], (minute, step | {"ph": step["ph"] + 0.125})]


def test_a_time_that_moved_is_seen(tmp_path):
    files = make_files("events", np.random.default_rng(0))
    cache = built(tmp_path / "d", "events", files)
    first = files[0].meant[0]
    files[0].meant[0] = unchanged(first.id, [*first.value[:-1], (first.value[-1][0] + 1, first.value[-1][1])])
    assert compare_cache(cache, files, "", tmp_path / "d").wrong


def test_a_missing_sequence_that_no_note_counts_is_seen(tmp_path):
    files = make_files("tokens", np.random.default_rng(0))
    cache = built(tmp_path / "d", "tokens", files)
    files[0].meant.append(unchanged(999, [1, 2]))
    assert compare_cache(cache, files, "", tmp_path / "d").wrong == [
        "1 sequences are not in the cache, but 0 are reported as left out"
    ]


class HungProcess(BaseProcess):
    """A process that has a case and never answers."""

    killed = False
    exitcode = -11

    def kill(self) -> None:
        self.killed = True

    def join(self, timeout: float | None = None) -> None:
        pass


@pytest.mark.parametrize(("dies", "why"), [(False, "the process hung for 0.2 s"), (True, "the process died with -11")])
def test_a_case_that_hangs_or_kills_its_process_fails_and_the_next_one_runs(monkeypatch, dies, why):
    processes, other_ends = [], []

    def start(seed: int, number: int) -> Worker:
        ours, theirs = multiprocessing.Pipe()
        processes.append(HungProcess())
        if dies:
            theirs.close()
        other_ends.append(theirs)
        return Worker(processes[-1], ours, number, time.monotonic())

    monkeypatch.setattr(bad_input_runs, "start_worker", start)
    outcomes = list(bad_input_runs.run_in_workers(0, [1, 2, 3], workers=1, limit=0.2))
    assert [(one.number, one.ends, one.wrong) for one in outcomes] == [
        (number, {"refuse": FAILED}, [why]) for number in (1, 2, 3)
    ]
    assert [one.killed for one in processes] == [True] * 3


def test_failures_are_listed_with_the_command_that_repeats_them_and_counted_in_the_last_line(capsys):
    good = Outcome(3, "values", "tokens", "null", {"refuse": "exit 3"}, [])
    bad = Outcome(4, "names", "text", "\x1b", {"refuse": FAILED}, ["refuse: a traceback"])
    bad_inputs.report([good, bad], 0, [], seed=5, seconds=1.0)
    printed = capsys.readouterr().out
    assert "again: python -m benchmarks.reliability.bad_inputs --seed 5 --only 4" in printed
    assert "\x1b" not in printed
    last = json.loads(printed.splitlines()[-1])
    assert (last["failed"], last["failed_cases"], last["total"]["exit 3"]) == (1, [4], 1)
