"""Memory that does not hold a batch: it is computed in parts, and the run comes to the same up to rounding and noise."""

from pathlib import Path

import pytest
import torch

from benchmarks.reliability.same_run import metrics_of
from tests.faults.runs import Place, assert_done, assert_same

pytestmark = pytest.mark.slow

QUIET = ("--dropout", "0")
"""Without drawn zeros parts differ from the whole by the drawn latents alone."""


@pytest.mark.parametrize("on_the_way", ["forward", "backward"])
def test_a_batch_that_does_not_fit_is_computed_in_parts(on_the_way: str, place: Place) -> None:
    fault = {"fault": "out_of_memory", "most_padded_steps": 600, "on_the_way": on_the_way, "from_position": 12}
    ended = assert_done(place.train("a", *QUIET, faults=[fault]))
    told = place.events("a", "out_of_memory")
    assert 1 <= len(told) <= 10  # once for each longest batch so far
    assert "computed in 2 parts from now on" in told[0]["said"]
    assert "an optimizer step learns from the same sequences as before" in ended.err
    assert_near(ended.run, assert_done(place.train("whole", *QUIET)).run)


def test_a_run_in_parts_goes_on_exactly(place: Place) -> None:
    fault = {"fault": "out_of_memory", "most_padded_steps": 600}
    whole = assert_done(place.train("whole", faults=[fault])).run
    killed = place.train("a", faults=[fault, {"fault": "kill", "hook": "on_train_batch_start", "at": 31}])
    assert killed.code < 0
    assert_same(assert_done(place.train("a", faults=[fault])).run, whole)


def test_where_not_even_one_sequence_fits_the_run_ends_with_advice(place: Place) -> None:
    ended = place.train("a", faults=[{"fault": "out_of_memory", "most_padded_steps": 20}])
    assert ended.code == 5
    assert "out of memory with a single sequence of" in ended.err.splitlines()[-1]
    assert "--max_sequence_length" in ended.err.splitlines()[-1]


def assert_near(one: Path, other: Path) -> None:
    """The same number of steps, learnt from the same sequences: the losses hardly differ."""
    first, second = (torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (one, other))
    assert first["global_step"] == second["global_step"]
    rows = [[float(row["loss"]) for row in metrics_of(run) if row["loss"]] for run in (one, other)]
    assert rows[0][:3] == rows[1][:3]  # before anything was split
    assert rows[0] == pytest.approx(rows[1], rel=0.01)
