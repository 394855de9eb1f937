"""metrics.csv and the stopwatch behind it: no row twice, none missing, no time counted that is not meant."""

import logging
import resource
from pathlib import Path

import pytest

from seqvae.training.callbacks.progress import MetricsFile, Stopwatch
from tests.support.scripted_training import Clock, read_rows

# --- The file -------------------------------------------------------------------------------------------------------


def file_with(path: Path, rows: int) -> MetricsFile:
    file = MetricsFile(path, ("step", "loss"))
    file.begin()
    for step in range(rows):
        file.append({"step": step, "loss": step / 2})
    return file


def test_a_row_can_be_read_as_soon_as_it_is_written(tmp_path):
    file = file_with(tmp_path / "metrics.csv", rows=2)
    file.append({"step": 2})
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n0,0.0\n1,0.5\n2,\n"


def test_going_on_drops_what_was_written_after_the_checkpoint(tmp_path):
    file = file_with(tmp_path / "metrics.csv", rows=3)
    state = file.state()
    file.append({"step": 3})
    with file.path.open("a") as torn:
        torn.write("4,0.")
    resumed = MetricsFile(file.path, file.columns)
    resumed.begin(state)
    resumed.append({"step": 30})
    assert [row["step"] for row in read_rows(file.path)] == ["0", "1", "2", "30"]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_going_on_with_other_columns_keeps_the_common_ones(tmp_path):
    state = file_with(tmp_path / "metrics.csv", rows=1).state()
    resumed = MetricsFile(tmp_path / "metrics.csv", ("loss", "kl"))
    resumed.begin(state)
    assert read_rows(resumed.path) == [{"loss": "0.0", "kl": ""}]


def test_going_on_in_another_directory_begins_a_file(tmp_path):
    resumed = MetricsFile(tmp_path / "metrics.csv", ("step",))
    resumed.begin({"rows": 7, "unwritten": []})
    assert resumed.path.read_text() == "step\n"
    assert resumed.state() == {"rows": 0, "unwritten": []}


@pytest.mark.parametrize(
    "foreign", [b"\xff\xfe\x00", b"step,loss\n1," + b"x" * 200_000, b'"', b"\n\n", b"a,b,c\n1,2,3,4\n"]
)
def test_a_file_that_somebody_else_wrote_is_no_reason_not_to_go_on(foreign, tmp_path):
    file = MetricsFile(tmp_path / "metrics.csv", ("step", "loss"))
    file.path.write_bytes(foreign)
    file.begin({"rows": 5, "unwritten": []})
    file.append({"step": 7, "loss": 0.5})
    assert file.path.read_text().splitlines()[0] == "step,loss"
    assert file.path.read_text().splitlines()[-1] == "7,0.5"


def test_on_a_full_disk_rows_wait_it_is_said_once_and_nothing_is_lost(tmp_path, caplog):
    file = file_with(tmp_path / "metrics.csv", rows=1)
    whole = file.path.read_text()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 5, before[1]))  # room for half a row
    try:
        file.append({"step": 1000000, "loss": 1})
        file.append({"step": 2000000, "loss": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "metrics.csv" in caplog.text
    assert file.state() == {"rows": 1, "unwritten": ["1000000,1\n", "2000000,2\n"]}
    file.append({"step": 3000000, "loss": 3})
    assert file.path.read_text() == f"{whole}1000000,1\n2000000,2\n3000000,3\n"


def test_rows_that_wait_travel_with_the_checkpoint(tmp_path):
    file = file_with(tmp_path / "metrics.csv", rows=1)
    resumed = MetricsFile(file.path, file.columns)
    resumed.begin({"rows": 1, "unwritten": ["1,7\n"]})
    resumed.append({"step": 2})
    assert [row["step"] for row in read_rows(file.path)] == ["0", "1", "2"]


# --- The time -------------------------------------------------------------------------------------------------------


def test_pauses_are_no_part_of_a_lap_but_of_the_run():
    clock = Clock()
    watch = Stopwatch(clock, seconds=50.0, lap_seconds=1.0)
    clock.seconds += 2
    watch.pause()
    clock.seconds += 30
    assert watch.lap_seconds == 3.0
    watch.unpause()
    clock.seconds += 4
    assert watch.end_lap() == 7.0
    assert watch.lap_seconds == 0.0
    assert watch.seconds == 86.0
