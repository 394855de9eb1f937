"""What happens to one of two processes: both end or both go on, and neither waits for ever."""

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from seqvae.errors import ExitCode
from seqvae.files import read_rows
from tests.faults.runs import on_posix
from tests.support.launched import COLUMNS, Ended, ends, events_of, free_port, ranked, start, wait_for_step

pytestmark = [on_posix, pytest.mark.slow]

SECONDS = 60
"""That two processes may take to end, on a busy machine."""
FULL = {"fault": "full_disk", "most_bytes": 60_000, "hook": "on_train_batch_start", "at": 6}
NO_ROW = {"fault": "full_disk", "most_bytes": 10, "hook": "on_train_batch_start", "at": 6}
IMPATIENT = {"fault": "impatient"}


@pytest.fixture
def words(shared: Path) -> str:
    places = f"--data_dir {shared / 'data'} --cache_dir {shared / 'data' / 'cache'} --run_name two"
    return f"{places} --batches_per_step 4 --checkpoint_every_n_steps 2"


def both(folder: Path, words: str, *faults: Sequence[Mapping[str, Any]]) -> list[Ended]:
    """Train with the faults of each process, and return how both ended."""
    port = free_port()
    processes = [start(folder, words, ranked(rank, 2, port), faults=some) for rank, some in enumerate(faults)]
    return ends(processes, timeout=SECONDS)


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGUSR1, ExitCode.REQUEUE), (signal.SIGTERM, ExitCode.TERMINATED)]
)
def test_a_signal_to_either_stops_both_after_the_same_step(words, tmp_path, number, code, to):
    port = free_port()
    processes = [start(tmp_path, f"{words} --max_steps 100000", ranked(rank, 2, port)) for rank in range(2)]
    wait_for_step(tmp_path / "runs" / "two", 3, processes)
    processes[to].send_signal(number)
    first, second = ends(processes, timeout=SECONDS)
    assert (first.code, second.code) == (code, 0), first.errors
    assert f"stopped by {number.name} after step" in first.errors
    assert "which is saved. To go on:" in first.errors


def test_the_time_that_was_given_ends_both(words, tmp_path):
    ended = both(tmp_path, f"{words} --max_steps 100000 --max_time 0:00:02", [], [])
    assert [one.code for one in ended] == [0, 0], ended
    assert read_rows(tmp_path / "runs" / "two" / "events.jsonl")[-1]["ended_by"] == "max_time"


def test_steps_that_come_to_nan_in_one_process_take_both_back_as_they_take_one(words, tmp_path):
    """The first five are those of one process of two in five steps in a row."""
    nan = {"fault": "nan", "positions": [17, 21, 25, 29, 33]}
    ended = both(tmp_path / "both", words, [nan], [nan])
    assert [one.code for one in ended] == [0, 0], ended
    (alone,) = ends([start(tmp_path / "alone", words, faults=[nan])])
    assert alone.code == 0, alone.errors
    runs = [tmp_path / name / "runs" / "two" for name in ("both", "alone")]
    assert [events_of(run).count("step_skipped") for run in runs] == [5, 5]
    assert [events_of(run).count("rolled_back") for run in runs] == [1, 1]
    curves = [pd.read_csv(run / "metrics.csv")[COLUMNS] for run in runs]
    pd.testing.assert_frame_equal(*curves, rtol=1e-3, check_exact=False)


@pytest.mark.parametrize(
    ("faults", "codes", "said"),
    [
        pytest.param([[FULL, IMPATIENT], []], [ExitCode.STORAGE, 0], "what was there before is whole", id="checkpoint"),
        pytest.param([[NO_ROW, IMPATIENT], []], [ExitCode.STORAGE, ExitCode.PROCESSES], "", id="rows"),
        pytest.param(
            [[], [{"fault": "out_of_memory", "most_padded_steps": 300, "from_position": 12}]],
            [ExitCode.PROCESSES, ExitCode.OUT_OF_MEMORY],
            "process 1 (",
            id="memory",
        ),
    ],
)
def test_what_one_process_cannot_do_ends_both(words, tmp_path, faults, codes, said):
    since = time.monotonic()
    ended = both(tmp_path, f"{words} --max_steps 100000", *faults)
    assert time.monotonic() - since < SECONDS
    assert [one.code for one in ended] == codes, ended
    assert said in ended[0].errors
