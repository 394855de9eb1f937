"""Verdicts in whole runs: what is said and written of them, what they end, and that a broken run tells the same story."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Callback

from seqvae.files import JsonLines, read_rows
from seqvae.monitors import PosteriorCollapsed, Verdict
from seqvae.monitors.callback import seconds_left
from seqvae.monitors.detector import Detector
from seqvae.reports.run_files import HEALTHY, LAST
from seqvae.training.callbacks.checkpoint import Checkpoints
from seqvae.verdicts import describe_change
from tests.support.foreign_vaes import LSTMVAE, QUIET, ProbeableImageVAE, Sentences, pictures, q_of
from tests.support.scripted_vaes import (
    LONG,
    SaveAtSteps,
    ScriptedVAE,
    events_of,
    lives,
    quiet,
    script,
    step_of,
    verdicts_of,
    watch,
)
from tests.support.short_runs import Record, assert_same, train
from tests.support.tiny_vaes import OpaqueVAE, make_batches, make_trainer

pytestmark = QUIET
STORY = ["cannot_tell", "healthy", "collapsing", "collapsed"]
"""What `ScriptedVAE` goes through; between the last two the verdict is open for a while."""


@pytest.fixture(scope="module")
def warned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unbroken run of the whole story."""
    directory = tmp_path_factory.mktemp("warned")
    watch(directory, quiet())
    return directory


# --- What is said and written ---------------------------------------------------------------------------------------


def test_each_change_of_verdict_is_an_event_and_a_line_and_the_last_is_repeated_at_the_end(tmp_path, capsys):
    watch(tmp_path, quiet())
    changes = verdicts_of(tmp_path)
    assert list(dict.fromkeys(["cannot_tell", *(change["verdict"] for change in changes)])) == STORY
    assert [change["was"] for change in changes] == ["cannot_tell", *(change["verdict"] for change in changes[:-1])]
    first, *lines, remark, last = capsys.readouterr().out.splitlines()
    assert first.endswith("the prior is taken to be N(0, I)")
    assert remark.endswith(
        "judged by time alone: ScriptedVAE has no nll_of_drawn(batch, z) beside nll_given_z(batch, z)"
    )
    assert lines == [f"posterior: {describe_change(*change_in(change))}" for change in changes]
    assert last.startswith(
        f"posterior: collapsed since step {step_of('collapsed', tmp_path)}: the decoder models the data"
    )


def change_in(change: dict[str, Any]) -> tuple[Verdict, str | None, int]:
    """What a line tells of an event; that nothing was known before is not worth a word."""
    names = {"name": "verdict", **{name: name for name in Verdict._fields[1:]}}
    verdict = Verdict(**{name: change[key] for name, key in names.items() if key in change})
    return verdict, None if change["was"] == "cannot_tell" else change["was"], change["step"]


def test_a_verdict_in_the_events_has_its_reason_its_numbers_and_its_advice(warned):
    fields = {"step", "event", "verdict", "was", "since_step", "evidence", "advice", "numbers"}
    for change in verdicts_of(warned):
        assert set(change) - {"dead_by_step"} == fields
        assert change["since_step"] == change["step"]
        assert set(change["numbers"]) == {"rate", "mutual_information", "decoder_use"}
        assert bool(change["advice"]) == (change["verdict"] in ("collapsing", "collapsed"))
        assert not any("--" in line for line in change["advice"])  # this module has no command, and no flags
        assert ("dead_by_step" in change) == (change["verdict"] == "collapsing")
    assert (
        step_of("collapsing", warned)
        < next(change["dead_by_step"] for change in verdicts_of(warned) if "dead_by_step" in change)
        < LONG
    )


def test_each_row_of_a_reading_carries_the_verdict_in_force(warned):
    changes = {change["step"]: change["verdict"] for change in verdicts_of(warned)}
    in_force = "cannot_tell"
    for row in read_rows(warned / "posterior.jsonl"):
        in_force = changes.get(row["step"], in_force)
        assert row["verdict"] == in_force


def test_a_talkative_run_prints_each_reading_besides(tmp_path, capsys):
    watch(tmp_path, quiet(verbose=True))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(read_rows(tmp_path / "posterior.jsonl")) + len(verdicts_of(tmp_path)) + 3


# --- Stopping -------------------------------------------------------------------------------------------------------


def test_a_script_with_on_collapse_stop_ends_with_code_7_and_a_checkpoint_to_go_on_from(tmp_path, warned):
    ended = script(tmp_path, "draw")
    readings = [row["step"] for row in read_rows(warned / "posterior.jsonl")]
    # A tenth of the run after the verdict: the latent had been alive.
    step = min(one for one in readings if one >= step_of("collapsed", warned) + 0.1 * LONG)
    saved = tmp_path / "collapsed.ckpt"
    assert ended.returncode == 7
    assert ended.stderr.splitlines()[-1] == (
        f"posterior: collapsed: stopped after step {step}, which is saved as {saved}"
    )
    assert read_rows(tmp_path / "events.jsonl")[-1] | {"time": 0} == {
        "time": 0,
        "step": step,
        "event": "stopped",
        "verdict": "collapsed",
    }
    assert len(list((tmp_path / "plots").glob("*.png"))) == 5
    watch(tmp_path, quiet(on_collapse="stop"), ckpt_path=saved)  # it is not stopped once more
    assert read_rows(tmp_path / "posterior.jsonl") == read_rows(warned / "posterior.jsonl")
    assert verdicts_of(tmp_path) == verdicts_of(warned)


def test_a_run_that_goes_on_although_it_has_collapsed_reports_that_first(tmp_path, capsys):
    with pytest.raises(PosteriorCollapsed):
        watch(tmp_path, quiet(on_collapse="stop"))
    step = step_of("collapsed", tmp_path)
    capsys.readouterr()
    trainer = watch(tmp_path, quiet(on_collapse="stop"), ckpt_path=tmp_path / "collapsed.ckpt")
    assert trainer.global_step == LONG
    assert capsys.readouterr().out.startswith(f"posterior: collapsed since step {step}; the run continues nevertheless")


def test_a_script_may_catch_the_end_and_go_on(tmp_path):
    with pytest.raises(PosteriorCollapsed) as ended:
        watch(tmp_path, quiet(on_collapse="stop"))
    assert (ended.value.code, ended.value.verdict.name) == (7, "collapsed")
    watch(tmp_path, quiet(), module=ScriptedVAE(lives))
    assert [change["verdict"] for change in verdicts_of(tmp_path)] == ["healthy"]
    assert "stopped" not in events_of(tmp_path)


@pytest.mark.parametrize("step", [3, 4, 5, 6])
def test_a_run_stopped_where_a_validation_is_due_or_not_goes_on_exactly(step, tmp_path, monkeypatch):
    """Two batches to a step, a validation at each second step, the last one of an epoch at step 4."""
    unbroken = train(tmp_path / "unbroken")
    judge = Detector.judge

    def harsh(self: Detector, reading: Any, **options: Any) -> Verdict:
        if reading.step != step:
            return judge(self, reading, **options)
        self.verdict = Verdict("collapsed", step - 1000, "as the test wants it, and long since")
        return self.verdict

    before, place = Record(), tmp_path / "broken"
    with monkeypatch.context() as patch:
        patch.setattr(Detector, "judge", harsh)
        with pytest.raises(PosteriorCollapsed):
            train(place, [quiet(on_collapse="stop", log_dir=place), before])
    assert torch.load(place / LAST, weights_only=True)["global_step"] == step
    after = train(place, [quiet(on_collapse="stop", log_dir=place)], checkpoint=place / LAST)
    assert_same(after, unbroken)
    assert before.validations + after.validations == unbroken.validations


class Deaf(ScriptedVAE):
    """A rate that something holds up, and a decoder that does not listen."""

    def posterior_of(self, batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.zeros(len(batch), 3), torch.full((len(batch), 3), -3.0)

    def nll_given_z(self, batch: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return batch.square().sum(dim=1)


def test_a_decoder_that_ignores_z_stops_a_run_too(tmp_path, capsys):
    with pytest.raises(PosteriorCollapsed):
        watch(tmp_path, quiet(on_collapse="stop"), module=Deaf())
    assert capsys.readouterr().err.startswith("posterior: decoder ignores z: stopped after step ")


# --- Runs that end by the clock -------------------------------------------------------------------------------------


class HalfAMinute(Callback):
    """Ends a run after 30 seconds of a clock that goes on by a tenth of a second with each step."""

    seconds = 0.0

    def seconds_left(self) -> float:
        return 30.0 - self.seconds

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.seconds += 0.1
        trainer.should_stop = self.seconds_left() <= 0


def test_a_run_that_ends_by_the_clock_is_judged_by_the_steps_that_it_will_reach(tmp_path, monkeypatch):
    """Of a million steps that are planned, 300: with patience for a million, it was never called."""
    clock = HalfAMinute()
    monkeypatch.setattr("seqvae.monitors.callback.time", SimpleNamespace(monotonic=lambda: clock.seconds))
    trainer = watch(tmp_path, quiet(), clock, module=ScriptedVAE(lambda step: 0.0), max_steps=1_000_000)
    assert 290 <= trainer.global_step <= 301
    steps = [row["step"] for row in read_rows(tmp_path / "posterior.jsonl")]
    assert steps[:3] == [20, 24, 30]
    assert step_of("collapsed", tmp_path) <= 180


def test_the_time_that_lightning_leaves_a_run_is_known(tmp_path):
    assert seconds_left(make_trainer(tmp_path, [], max_steps=9)) is None
    assert seconds_left(make_trainer(tmp_path, [], max_steps=9, max_time={"minutes": 1})) == 60.0


# --- The checkpoint to go back to -----------------------------------------------------------------------------------


def test_the_healthy_checkpoint_is_the_last_one_before_the_trouble(tmp_path):
    monitor = quiet(probe_batch=make_batches(1, size=32)[0])
    checkpoints = Checkpoints(tmp_path / "checkpoints", every_n_steps=4, watchers=[monitor])
    options: dict[str, Any] = {"limit_val_batches": 0, "enable_checkpointing": True}
    watch(tmp_path, monitor, checkpoints, **options)
    healthy = torch.load(tmp_path / "checkpoints" / HEALTHY, weights_only=True)
    information = {row["step"]: row["mutual_information"] for row in read_rows(tmp_path / "posterior.jsonl")}
    # Before the verdict changed: three readings had begun to fall by then, and none of them is worth going back to.
    assert 50 < healthy["global_step"] < (step_of("collapsing", tmp_path) - 1) // 4 * 4
    assert information[healthy["global_step"]] > 1
    again = Checkpoints(tmp_path / "again" / "checkpoints")
    watch(tmp_path / "again", monitor, again, ckpt_path=tmp_path / "checkpoints" / HEALTHY, **options)
    assert verdicts_of(tmp_path / "again") == verdicts_of(tmp_path)[1:]


@pytest.mark.parametrize("is_watched", [False, True])
def test_without_a_monitor_or_health_there_is_no_healthy_checkpoint(is_watched, tmp_path):
    monitor = quiet(probe_batch=make_batches(1, size=32)[0])
    checkpoints = Checkpoints(tmp_path, every_n_steps=4, watchers=[monitor] if is_watched else [])
    strength = ScriptedVAE(lambda step: 0.0) if is_watched else ScriptedVAE(lives)
    watch(tmp_path, monitor, checkpoints, module=strength, max_steps=40, limit_val_batches=0, enable_checkpointing=True)
    assert (tmp_path / LAST).exists()
    assert not (tmp_path / HEALTHY).exists()


# --- Going on -------------------------------------------------------------------------------------------------------


WAYS: dict[str, dict[str, Any]] = {
    "at each reading": {},
    "on suspicion": {"probe_every_n_readings": None},
    "now and then": {"probe_every_n_readings": 7},
    "not at all": {"probe_decoder": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_broken_anywhere_repeats_the_story_of_an_unbroken_one(way, tmp_path):
    """Saved before, at and after each change of verdict."""
    options: dict[str, Any] = {"accumulate_grad_batches": 2}
    watch(tmp_path, quiet(**WAYS[way]), **options)
    readings, changes = read_rows(tmp_path / "posterior.jsonl"), verdicts_of(tmp_path)
    assert len(changes) >= 3
    steps = {change["step"] + by for change in changes for by in (-1, 0, 1)}
    watch(tmp_path, quiet(**WAYS[way]), SaveAtSteps(tmp_path, steps), **options)
    for step in steps:
        watch(tmp_path, quiet(**WAYS[way]), ckpt_path=tmp_path / f"{step}.ckpt", **options)
        assert read_rows(tmp_path / "posterior.jsonl") == readings, step
        assert verdicts_of(tmp_path) == changes, step


def test_what_others_wrote_into_the_events_stays_and_a_new_run_begins_its_own(tmp_path):
    other = {"time": "2020-01-01T00:00:00.000Z", "step": 90, "event": "resumed"}
    JsonLines(tmp_path / "events.jsonl").append(other)
    JsonLines(tmp_path / "events.jsonl").append(other | {"step": 0, "event": "verdict", "verdict": "diverged"})
    for _ in range(2):
        watch(tmp_path, quiet(), max_steps=30)
        assert events_of(tmp_path) == ["resumed", "verdict"]
        assert read_rows(tmp_path / "events.jsonl")[0] == other


def test_what_is_not_offered_is_one_event_also_of_a_run_that_goes_on(tmp_path, capsys):
    watch(tmp_path, quiet(), SaveAtSteps(tmp_path, {3}), module=OpaqueVAE(), max_steps=6)
    watch(tmp_path, quiet(), module=OpaqueVAE(), max_steps=6, ckpt_path=tmp_path / "3.ckpt")
    assert events_of(tmp_path).count("decoder_not_asked") == 1
    assert capsys.readouterr().out.count("OpaqueVAE has no nll_given_z(batch, z)") == 2


# --- Other people's modules -----------------------------------------------------------------------------------------


class WeighedImageVAE(ProbeableImageVAE):
    """With a KL weight of the test's choice."""

    weighs = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        mean, logvar = outputs["posterior_mean"], outputs["posterior_logvar"]
        kl = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).sum(dim=1).mean()
        return outputs | {"loss": outputs["loss"] + (self.weighs - outputs["kl_weight"]) * kl, "kl_weight": self.weighs}


class WeighedLSTMVAE(LSTMVAE):
    weighs = 1.0

    def training_step(self, batch: Any) -> Any:
        outputs = super().training_step(batch)
        mean, sigma = outputs["q"]
        kl = (0.5 * (mean**2 + sigma**2 - 1) - sigma.log()).sum(dim=1).mean()
        return outputs | {"loss": outputs["loss"] + (self.weighs - 0.3) * kl}


WEIGHTS = {("images", "little"): 1.0, ("images", "much"): 100.0, ("lstm", "little"): 0.1, ("lstm", "much"): 10.0}


@pytest.mark.parametrize(("weight", "verdict"), [("little", "healthy"), ("much", "collapsed")])
@pytest.mark.parametrize("kind", ["images", "lstm"])
def test_two_foreign_modules_are_healthy_with_little_weight_and_collapsed_with_much(kind, weight, verdict, tmp_path):
    torch.manual_seed(0)
    images = kind == "images"
    module: Any = WeighedImageVAE() if images else WeighedLSTMVAE()
    module.weighs = WEIGHTS[kind, weight]
    loaders = [pictures(640, 32), pictures(64, 32)] if images else [Sentences(20, 32), Sentences(2, 32)]
    monitor = quiet(posteriors=256, **({} if images else {"read_outputs": q_of}))
    make_trainer(tmp_path, [monitor], max_steps=300).fit(module, *loaders)
    assert monitor.verdict.name == verdict, monitor.verdict
