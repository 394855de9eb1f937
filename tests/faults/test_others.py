"""What others do to a run: a second one in its directory, data that go or change, loaders that die, another number of processes."""

from pathlib import Path

import pytest

from tests.faults.runs import Place, assert_done, assert_same, make_data, on_posix

pytestmark = [on_posix, pytest.mark.slow]


def test_a_second_run_in_the_same_directory_is_refused(place: Place, unbroken: Path) -> None:
    hold = {"fault": "wait", "hook": "on_train_batch_start", "at": 9, "path": str(place.directory / "go")}
    with place.start("a", faults=[hold]) as first:
        assert first.stdout is not None
        while not first.stdout.readline().startswith("step  4/24"):
            pass
        second = place.train("a")
        (place.directory / "go").touch()
        first.communicate()
    assert second.code == 2
    assert f"is in use by another run (process {first.pid})" in second.err.splitlines()[-1]
    assert first.returncode == 0
    assert_same(place.run("a"), unbroken)


def test_a_run_goes_on_from_its_cache_when_the_parquet_goes(place: Place) -> None:
    data = make_data(place.directory / "data")
    words = ("--data_dir", str(data), "--cache_dir", str(place.directory / "cache"))
    whole = assert_done(place.train("whole", *words)).run
    gone = {"fault": "remove", "path": str(data), "hook": "on_train_batch_start", "at": 9}
    assert_same(assert_done(place.train("a", *words, faults=[gone])).run, whole)
    again = place.train("a", *words, "--max_steps", "30")
    assert again.code == 3
    assert "does not exist" in again.err.splitlines()[-1]


def test_a_run_is_refused_other_data_than_it_began_with(place: Place) -> None:
    data = make_data(place.directory / "data")
    words = ("--data_dir", str(data), "--cache_dir", str(place.directory / "cache"))
    assert_done(place.train("a", *words))
    make_data(data, shift=1)
    again = place.train("a", *words, "--max_steps", "30")
    assert again.code == 2
    assert "is of another run: data: content" in again.err.splitlines()[-1]


def test_too_many_open_files_are_a_line_that_names_the_limit_and_the_flag(place: Place) -> None:
    words = ("--worker_type", "process", "--num_workers", "16")
    ended = place.train("a", *words, faults=[{"fault": "few_files", "most": 64}])
    assert ended.code == 6
    assert "Traceback" not in ended.err
    assert "Too many open files" in ended.err.splitlines()[-1]
    assert "`ulimit -n 4096`, or give fewer --num_workers" in ended.err.splitlines()[-1]


@pytest.mark.parametrize("worker_type", ["thread", "process"])
@pytest.mark.parametrize("what", ["raise", "hang", "die"])
def test_a_loader_that_fails_once_is_started_again_where_it_was(
    what: str, worker_type: str, place: Place, unbroken: Path
) -> None:
    if (what, worker_type) == ("die", "thread"):
        pytest.skip("a thread that dies without a word does not exist")
    words = ("--worker_type", worker_type, "--num_workers", "1", "--loader_timeout_seconds", "20")
    ended = assert_done(place.train("a", *words, faults=[{"fault": "gather", "what": what, "at": 9}]))
    (told,) = place.events("a", "loader_restarted")
    assert told["said"] in ended.err
    assert_same(ended.run, unbroken)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_processes_from_the_same_position(
    before: int, after: int, place: Place
) -> None:
    stop = {"fault": "send", "name": "term", "hook": "on_train_batch_start", "at": 9}
    stopped = place.train("a", "--devices", str(before), faults=[stop])
    assert stopped.code == 143
    (end,) = place.events("a", "interrupted")
    ended = assert_done(place.train("a", "--devices", str(after)))
    assert place.events("a", "resumed")[0]["step"] == end["step"]
    assert "done: validation ELBO" in ended.out
