"""time_to_quality: what its curves mean, that both sides measure the same thing, and that it runs on next to nothing."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.speed import time_to_quality
from benchmarks.speed.quality_trainees import (
    WHEEL,
    Candidate,
    Molecules,
    Moses,
    MosesMissing,
    MosesTrainee,
    Portion,
    Stretch,
    find_wheel,
    hugging_face,
    load_moses,
    moses_elbo_B,
    padded,
    write_demo_tokens,
)
from benchmarks.speed.time_to_quality import (
    LOOKS,
    Contest,
    Effort,
    Point,
    compare,
    race,
    run_contest,
    seconds_to,
    smoothed,
    tokens_per_second,
    try_all,
)

# Lightning 2.6.6 asks torch 2.13 in a way that torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")

TINY = ("--width", "16", "--depth", "1", "--heads", "2", "--latent_size", "2", "--num_workers", "0")


EFFORT = Effort(True, turn_seconds=2.0, rounds=3, seeds=1)


class ToyTrainee:
    """A training that gains `gain` nats and 100 tokens per second."""

    parameters = 7

    def __init__(self, gain: float, log: list[str], name: str) -> None:
        self.gain, self.log, self.name = gain, log, name
        self.elbo = -100.0

    def train(self, seconds: float) -> Stretch:
        self.log.append(self.name)
        self.elbo += self.gain * seconds
        return Stretch(seconds, round(100 * seconds))

    def validate(self) -> float:
        return self.elbo

    def close(self) -> None:
        self.log.append(f"{self.name} closed")


def toys(gains: dict[str, float], log: list[str]) -> list[Candidate]:
    def candidate(name: str, gain: float) -> Candidate:
        return Candidate(name, 1e-3, "1 toy", lambda seed: ToyTrainee(gain, log, f"{name}{seed}"))

    return [candidate(name, gain) for name, gain in gains.items()]


def few_tokens(directory: Path) -> Path:
    return write_demo_tokens(directory, train_sequences=200, valid_sequences=10, mean_length=5)


def curve(*elbos: float) -> list[Point]:
    return [Point(10.0 * k, 1000 * k, elbo) for k, elbo in enumerate(elbos)]


def test_an_elbo_is_reached_where_the_curve_first_crosses_it():
    assert seconds_to(curve(-90, -50, -60, -40), -50.0) == 10.0
    assert seconds_to(curve(-90, -50, -60, -40), -45.0) == 27.5
    assert seconds_to(curve(-90, -50), -40.0) == math.inf
    assert seconds_to(curve(-40, -50), -45.0) == 0.0


def test_tokens_per_second_leaves_the_first_turn_out():
    slow_turn = [Point(50.0 * k, 10 * k, -9.0) for k in range(LOOKS)]
    assert tokens_per_second([*slow_turn, Point(200, 40, -8.0), Point(210, 140, -7.0)]) == 10.0


def test_the_target_is_the_best_of_the_other_side_seed_by_seed():
    found = compare([curve(-90, -50, -55), curve(-90, -70, -30)], [curve(-90, -10, -5), curve(-90, -80, -70)])
    assert found.targets == [-50, -30]
    assert found.theirs == [10, 20]
    assert found.ours == [5, math.inf]
    assert found.ratios == [2, 0]


def test_without_a_target_the_candidate_with_the_best_elbo_comes_first():
    log: list[str] = []
    trials = try_all(toys({"a": 1, "b": 4, "c": math.nan}, log), EFFORT)
    assert [trial.candidate.name for trial in trials] == ["b", "a", "c"]
    assert trials[0].curve[-1] == Point(5.25, 525, -79.0)
    assert log[:12] == ["a1000"] * LOOKS + ["b1000"] * LOOKS + ["c1000"] * LOOKS


def test_with_a_target_the_soonest_candidate_comes_first_and_then_the_closest():
    trials = try_all(toys({"a": 1, "b": 4, "c": 2, "d": 8}, []), EFFORT, target=-80.0)
    assert [(trial.candidate.name, pytest.approx(trial.seconds)) for trial in trials] == [
        ("d", 2.5),
        ("b", 5.0),
        ("c", math.inf),
        ("a", math.inf),
    ]


def test_one_lucky_validation_does_not_count():
    assert smoothed(curve(-90, -50, -70), 2) == [Point(5, 500, -70), Point(15, 1500, -60)]
    assert smoothed(curve(-90, -50), 1) == curve(-90, -50)


def test_each_side_chooses_before_the_race(capsys: pytest.CaptureFixture[str]):
    sides = [toys({"slow": 1, "slower": 0.5}, []), toys({"ours": 2, "ours too": 20}, [])]
    result = run_contest(Contest("Toys", sides), Effort(True, 4.0, rounds=3, seeds=1))
    assert [rows[0]["training"] for rows in result["chosen_from"]] == ["slow", "ours too"]
    assert [row["training"] for row in result["rows"]] == ["slow", "ours too"]
    assert "the first one is taken" in capsys.readouterr().out


def test_a_race_goes_round_in_turns_of_equal_time():
    log: list[str] = []
    (a, b), parameters = race(toys({"a": 1, "b": 2}, log), [0, 1], turn_seconds=4.0, rounds=2)
    assert log[: 8 * LOOKS : LOOKS] == ["a0", "b0", "a1", "b1"] * 2
    assert a[0][-1] == Point(6.5, 650, -93.5)
    assert b[1][-1] == Point(6.5, 650, -87.0)
    assert parameters == [7, 7]


def test_all_trainings_are_closed_even_if_one_cannot_start():
    log: list[str] = []
    race(toys({"a": 1, "b": 2}, log), [0], turn_seconds=4.0, rounds=2)
    assert log[-2:] == ["b0 closed", "a0 closed"]

    def no_start(seed: int) -> ToyTrainee:
        raise RuntimeError("no room")

    broken = Candidate("broken", 1e-3, "1 toy", no_start)
    with pytest.raises(RuntimeError, match="no room"):
        race([*toys({"c": 1}, log), broken], [0], turn_seconds=4.0, rounds=2)
    assert log[-1] == "c0 closed"


def test_a_contest_reports_how_many_times_as_long_the_other_took(capsys: pytest.CaptureFixture[str]):
    sides = [[candidate] for candidate in toys({"slow": 1, "ours": 5}, [])]
    result = run_contest(Contest("Toys", sides), Effort(False, 4.0, rounds=2, seeds=3))
    assert result["rows"][0]["times as long"] == 4.33  # the first mean of looks stands at 1.5 s
    assert result["rows"][0]["tokens/s, ratio"] == 1.0
    assert "times as long" in capsys.readouterr().out


# --- MOSES ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def moses() -> Moses:
    """Return the package if its wheel is there already; nothing is downloaded here."""
    path = Path(sys.prefix) / WHEEL
    if not path.exists():
        pytest.skip(f"{path.name} is not there: `python -m benchmarks.speed.time_to_quality --part moses` downloads it")
    try:
        return load_moses(path)
    except MosesMissing as missing:
        pytest.skip(str(missing))


MOLECULES = Molecules(["CCO", "CCCN", "C", "CNC(=O)C"], ["CCO", "CCCN"])


def test_the_elbo_from_moses_logits_is_the_negative_of_its_own_loss(moses: Moses):
    model = MosesTrainee(moses, MOLECULES, rate=1e-3, batch_size=2, seed=0).model
    texts = [model.string2tensor(text) for text in ("CCCN", "CO", "N")]
    torch.manual_seed(5)
    kl_mean, nll_mean_of_symbols = model(texts)
    torch.manual_seed(5)
    symbols = 5 + 3 + 2  # with end marks
    assert moses_elbo_B(model, texts).mean().item() == pytest.approx(
        -(kl_mean + nll_mean_of_symbols * symbols / 3).item()
    )


def test_moses_weighs_a_nat_of_kl_like_a_nat_of_nll(moses: Moses):
    trainee = MosesTrainee(moses, MOLECULES, rate=1e-3, batch_size=2, seed=0)
    assert trainee.kl_weight == pytest.approx(4 / (4 + 5 + 2 + 9))


def test_moses_trains_in_turns_and_is_validated_on_the_same_noise(moses: Moses):
    trainee = MosesTrainee(moses, MOLECULES, rate=1e-3, batch_size=2, seed=0)
    before = trainee.validate()
    assert trainee.validate() == before
    stretches = [trainee.train(seconds=0.0) for _ in range(8)]
    assert sum(stretch.tokens for stretch in stretches) == 4 * (3 + 4 + 1 + 8)
    assert trainee.validate() > before


def test_a_portion_gives_one_batch_at_least_and_counts_characters_alone():
    batches = iter([[torch.zeros(5), torch.zeros(3)], [torch.zeros(9)]])
    portion = Portion(batches, until=0.0)
    assert len(list(portion)) == 1
    assert portion.characters == 4


def test_a_wheel_that_is_not_the_published_one_is_refused(tmp_path: Path):
    (tmp_path / WHEEL).write_bytes(b"something else")
    with pytest.raises(MosesMissing, match="not the file that was published"):
        find_wheel(tmp_path)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def test_rows_are_padded_to_the_longest_and_counted_without_padding():
    batch = padded([{"tokens": [3, 1, 2]}, {"tokens": [4]}])
    assert batch.tokens_BT.tolist() == [[3, 1, 2], [4, 0, 0]]
    assert batch.lengths_B.tolist() == [3, 1]
    assert batch.step_tokens == 4


def test_the_bare_loop_learns_and_is_validated_on_the_same_noise(tmp_path: Path):
    pytest.importorskip("datasets")
    data = few_tokens(tmp_path / "tokens")
    trainee = hugging_face(data, TINY, 1e-2, torch.float32).start(0)
    before = trainee.validate()
    assert trainee.validate() == before
    for _ in range(5):
        assert trainee.train(seconds=0.0).tokens > 0
    assert trainee.validate() > before
    trainee.close()


# --- All of it --------------------------------------------------------------------------------------------------------


def test_reference_and_optimized_are_compared_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time_to_quality, "write_demo_tokens", few_tokens)
    report = json.loads(json.dumps(time_to_quality.run({"reference": Effort(False, 0.1, rounds=2, seeds=1)}, TINY)))
    other, ours = report["rows"]["reference"]
    assert other["M parameters"] == ours["M parameters"] > 0
    assert report["ratio"]["reference"] == [other["times as long"]]
