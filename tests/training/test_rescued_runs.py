"""Rescues in whole runs: what they heal and what they leave alone, and that a broken run is rescued as an unbroken one."""

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer

from benchmarks.reliability.same_run import differences_of_runs
from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import OptimizedSettings
from seqvae.data.demo import write_demo
from seqvae.errors import Stopped
from seqvae.files import read_rows
from seqvae.monitors.callback import PosteriorMetricsMonitor
from seqvae.monitors.detector import Detector
from seqvae.reports.run_files import BEST, HEALTHY, LAST
from seqvae.training.callbacks.rescue import Rescue, revive_decoder
from seqvae.training.fit import fit, make_monitors
from seqvae.training.module import TrainingModule
from seqvae.training.run_directory.checkpoint_file import read_lazily
from seqvae.training.schedules import Steering
from seqvae.verdicts import Verdict
from tests.support.short_runs import short_module
from tests.support.short_runs import train as short_train
from tests.support.small_models import make_batch

# Lightning 2.6.6 calls torch 2.13 in a way that torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")

TINY = (
    "--width 16 --heads 2 --depth 1 --latent_size 4 --precision 32 --kl_schedule constant --free_bits 0 --max_steps 24 "
    "--log_every_n_steps 2 --val_check_interval 3 --limit_val_batches 1.0 --checkpoint_every_n_steps 1 --num_workers 0 "
    "--dropout 0.2 --on_collapse rescue --rescue_budget 0.6"
)
BEGINS = 5
"""Step at which a run is made to collapse."""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("demo"), "tokens", sequences=200, mean_length=15)


def train(directory: Path, data_dir: Path, words: str = "", *callbacks: Callback, name: str = "run") -> Path:
    places = ["--data_dir", data_dir, "--cache_dir", data_dir / "cache", "--output_dir", directory, "--run_name", name]
    settings = parse_command_line(
        OptimizedSettings, [*TINY.split(), *map(str, places), *words.split()], prog="fit", description=""
    )
    fit(settings, [*make_monitors(settings), *callbacks])
    return directory / name


def make_collapse(monkeypatch: pytest.MonkeyPatch, *steps: int, lives: Callable[[int], bool]) -> None:
    """Let verdicts be a collapse at the first reading behind each of some steps, and life be a function of the step."""
    judge = Detector.judge

    def harsh(self: Detector, reading: Any, **options: Any) -> Verdict:
        verdict = judge(self, reading, **options)
        if any(step <= reading.step < step + 4 for step in steps):
            self.verdict = verdict = Verdict("collapsed", reading.step, "as the test wants it")
        return verdict

    monkeypatch.setattr(Detector, "judge", harsh)
    monkeypatch.setattr("seqvae.training.rescue.is_alive", lambda reading, margin=1.0: lives(reading.step))


def moves_of(run: Path) -> list[dict[str, Any]]:
    return [{**row, "time": ""} for row in read_rows(run / "events.jsonl") if row["event"] == "rescue"]


# --- Left alone -----------------------------------------------------------------------------------------------------


def test_without_an_alarm_a_run_that_would_be_rescued_is_the_run_that_would_not_be_to_the_last_bit(data_dir, tmp_path):
    rescued, warned = (train(tmp_path, data_dir, f"--on_collapse {how}", name=how) for how in ("rescue", "warn"))
    assert moves_of(rescued) == []
    found = differences_of_runs(rescued, warned)
    assert [line for line in found if "Rescue" not in line] == []
    one, other = (torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (rescued, warned))
    assert one["callbacks"].keys() - other["callbacks"].keys() == {"Rescue"}
    assert "steering" not in one


# --- What a rescue does ---------------------------------------------------------------------------------------------


class Look(Callback):
    """What each step is trained with."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        (optimizer,) = trainer.optimizers
        moments = [float(state["step"]) for state in optimizer.state.values()]
        self.rows.setdefault(
            trainer.global_step,
            {
                "weight": float(pl_module.kl_weight(trainer.global_step)),
                "free_bits": pl_module.objective.free_bits,
                "rate": optimizer.param_groups[0]["lr"],
                "moments": max(moments, default=0.0),
            },
        )


def test_a_rescue_changes_the_objective_resets_the_optimizer_and_raises_its_rate(data_dir, tmp_path, monkeypatch):
    make_collapse(monkeypatch, 20, lives=lambda step: step >= 23)
    look = Look()
    run = train(tmp_path, data_dir, "--beta 4 --lr 0.01", look)
    begun, *_ = moves = moves_of(run)
    assert [move["course"] for move in moves] == ["floor", "half_floor", "own", "own"]
    before, after = look.rows[begun["step"] - 1], look.rows[begun["step"]]
    assert (before["weight"], before["free_bits"], before["moments"]) == (4.0, 0.0, begun["step"] - 1)
    assert (after["weight"], after["free_bits"], after["moments"]) == (1.0, 1.5 / 4, 0.0)
    assert before["rate"] < 0.002  # near the end of its schedule
    assert max(row["rate"] for step, row in look.rows.items() if step > begun["step"]) > 0.005
    last = read_rows(run / "events.jsonl")[-1]
    assert (last["event"], last["total_steps"], last["step"]) == ("finished", 34, 34)  # 0.6 of 24 steps behind the 20th
    assert moves[-1]["used_steps"] <= 14
    assert look.rows[33]["rate"] < 0.002


def test_a_finished_run_that_a_rescue_made_longer_has_nothing_left_to_do(data_dir, tmp_path, monkeypatch, capsys):
    make_collapse(monkeypatch, 20, lives=lambda step: True)
    train(tmp_path, data_dir)
    capsys.readouterr()
    train(tmp_path, data_dir)
    assert "is finished (step 34 of 34" in capsys.readouterr().out


def test_what_a_rescue_added_stays_added_where_the_run_gets_another_length(data_dir, tmp_path, monkeypatch):
    make_collapse(monkeypatch, 20, lives=lambda step: True)
    run = train(tmp_path, data_dir)
    train(tmp_path, data_dir, "--max_steps 26")
    last = read_rows(run / "events.jsonl")[-1]
    assert (last["event"], last["total_steps"], last["step"]) == ("finished", 36, 36)


def test_a_rescue_whose_budget_ends_with_the_run_is_no_obstacle_to_its_end(data_dir, tmp_path, monkeypatch):
    make_collapse(monkeypatch, 24, lives=lambda step: False)
    assert moves_of(train(tmp_path, data_dir))[-1]["step"] == read_rows(tmp_path / "run" / "events.jsonl")[-1]["step"]


def test_while_a_rescue_goes_on_the_monitor_reads_often_probes_each_time_and_judges_nothing(
    data_dir, tmp_path, monkeypatch
):
    make_collapse(monkeypatch, BEGINS, lives=lambda step: False)
    run = train(tmp_path, data_dir, "--max_steps 80 --monitor_every_n_steps 4 --limit_val_batches 0")
    begun, *_, ended = moves_of(run)
    within = [row for row in read_rows(run / "posterior.jsonl") if begun["step"] < row["step"] <= ended["step"]]
    assert len(within) > 20
    assert all("decoder_use" in row and row["verdict"] == "cannot_tell" for row in within)
    first = next(row for row in within)
    assert first["posteriors"] < 200  # those of before are forgotten
    assert ended["phase"] == "given_up"


# --- Broken anywhere ------------------------------------------------------------------------------------------------


class StopAt(Callback):
    """Ctrl-C in an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            signal.raise_signal(signal.SIGINT)


STORIES: dict[str, Callable[[int], bool]] = {
    "healed": lambda step: step >= 7,
    "healed, and lost without a floor": lambda step: 7 <= step < 12,
    "beyond rescue": lambda step: False,
}


@pytest.mark.parametrize(
    ("story", "words"),
    [
        ("healed, and lost without a floor", "--beta 4"),
        *(
            pytest.param(story, words, marks=pytest.mark.slow)
            for story in STORIES
            for words in ("--beta 4 ", "--target_kl 2")
        ),
    ],
)
def test_a_run_broken_in_any_step_of_a_rescue_goes_on_as_one_that_was_not(
    story, words, data_dir, tmp_path, monkeypatch
):
    make_collapse(monkeypatch, BEGINS, 16, lives=STORIES[story])
    unbroken = train(tmp_path, data_dir, words, name="unbroken")
    moves = moves_of(unbroken)
    assert len(moves) >= 4
    for step in sorted({move["step"] + by for move in moves for by in ((0,) if words == "--beta 4" else (-1, 0, 1))}):
        with pytest.raises(Stopped):
            train(tmp_path, data_dir, words, StopAt(step), name=f"broken-{step}")
        broken = train(tmp_path, data_dir, words, name=f"broken-{step}")
        assert differences_of_runs(broken, unbroken) == [], step
        assert moves_of(broken) == moves, step
        assert story_of(broken) == story_of(unbroken), step


def story_of(run: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["verdict"]) for row in read_rows(run / "events.jsonl") if row["event"] == "verdict"]


# --- Healed ---------------------------------------------------------------------------------------------------------

DYING = (
    "--width 32 --heads 2 --depth 1 --latent_size 8 --beta 6 --lr 4e-3 --max_sequence_length 16 --tokens_per_batch 512 "
    "--gradient_accumulation_steps 1 --dropout 0 --max_steps 300 --val_check_interval 50 --monitor_every_n_steps 5 "
    "--log_every_n_steps 50 --checkpoint_every_n_steps 1000 --rescue_budget 0.5"
)


def test_a_run_whose_latent_dies_is_healed(tmp_path):
    data = write_demo(tmp_path, "tokens", sequences=1000, mean_length=12)
    run = train(tmp_path, data, DYING)
    begun, *_, ended = moves_of(run)
    assert (begun["outcome"], ended["phase"]) == ("collapsed", "watching")
    last = read_rows(run / "posterior.jsonl")[-1]
    assert last["mutual_information"] > 0.5
    probed = [row for row in read_rows(run / "posterior.jsonl") if "decoder_use" in row][-1]
    assert probed["decoder_use"] > max(0.5, 3 * probed["decoder_use_error"])
    assert last["verdict"] in ("healthy", "cannot_tell", "partly_collapsed")
    assert last["step"] <= 1.5 * 300
    best = read_lazily(run / "checkpoints" / BEST)["global_step"]
    assert best > ended["step"]  # though the dead state may have had the better ELBO


@pytest.mark.parametrize("has_healthy", [False, True])
def test_the_last_rung_takes_the_weights_of_the_healthy_checkpoint_or_lets_the_decoder_start_from_scratch(
    has_healthy, tmp_path
):
    module, other = short_module(), short_module()
    for weight in other.network.parameters():
        torch.nn.init.normal_(weight)
    if has_healthy:
        short_train(tmp_path / "checkpoints", module=other, max_steps=1, limit_val_batches=0)
        (tmp_path / "checkpoints" / LAST).rename(tmp_path / "checkpoints" / HEALTHY)
    before = {name: weight.clone() for name, weight in module.network.state_dict().items()}
    strategy = SimpleNamespace(broadcast=lambda decision: decision)
    made: Any = SimpleNamespace(default_root_dir=tmp_path, strategy=strategy, optimizers=[])
    revive_decoder(made, module)
    after = module.network.state_dict()
    if has_healthy:
        assert all(torch.equal(weight, after[name]) for name, weight in other.network.state_dict().items())
        return
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert changed
    assert all(name.startswith("decoder.") for name in changed)
    once_more = short_module()
    revive_decoder(made, once_more)  # another process
    assert all(torch.equal(weight, after[name]) for name, weight in once_more.network.state_dict().items())


def test_what_a_rescue_steers_by_reaches_batches_that_are_computed_in_parts():
    module = short_module()
    module.steer(Steering(kl_weight=0.5, free_bits=0.0, target_kl=None, since_step=3, added_steps=20))
    assert module.whole_batch([]) is None
    module.steer(Steering(kl_weight=0.5, free_bits=50.0, target_kl=None, since_step=3, added_steps=20))
    whole = module.whole_batch([make_batch("tokens", [5, 4])])
    assert whole is not None
    assert whole.above_floor_G is not None
    assert not whole.above_floor_G.any()
    assert (module.kl_weight_at(7), module.total_steps - module.planned_steps, module.own_objective.beta) == (
        0.5,
        20,
        1.0,
    )


def test_the_rescue_stands_right_behind_its_monitor():
    settings = parse_command_line(OptimizedSettings, ["--on_collapse", "rescue"], prog="fit", description="")
    monitor, rescue, _ = make_monitors(settings)
    assert isinstance(monitor, PosteriorMetricsMonitor)
    assert isinstance(rescue, Rescue)
    assert rescue.monitor is monitor
    assert rescue.describe(1000) == "a collapse is rescued, within 300 steps in all (--rescue_budget 0.3)"


def test_a_module_that_is_not_steered_has_no_steering():
    assert TrainingModule.steering is None
