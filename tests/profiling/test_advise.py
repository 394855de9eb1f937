"""What is proposed: only what was measured faster, alone and together, and a command line that says so."""

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest

from seqvae.cli.command_line import parse_command_line
from seqvae.config.run import RunSettings
from seqvae.config.training import OptimizedSettings, TrainingSettings
from seqvae.data.demo import write_demo
from seqvae.errors import DivergedError, SettingsError
from seqvae.profiling import advise as advise_module
from seqvae.profiling.advise import (
    Advice,
    Change,
    Contest,
    Trial,
    Verdict,
    advise,
    worth_measuring_again,
)
from seqvae.profiling.measured_run import MeasuredRunError, Recipe
from seqvae.reports.profile_report import advice_lines
from seqvae.reports.terminal import Ink
from tests.support.fake_runs import Behaviour, FakeRuns
from train_optimized import callbacks

COMPILED = Change("compiled", "compiler", {"compile_model": True}, "less memory traffic")
BFLOAT = Change("bf16-mixed", "precision", {"precision": "bf16-mixed"}, "other arithmetic", "numbers are rounded more")
UNFUSED = Change("unfused", "optimizer", {"fused_optimizer": False}, "none")
UNWATCHED = Change("not watching", "watching", {"disable_metrics_monitoring": True}, "no readings")


def recipe(settings: TrainingSettings | None = None) -> Recipe:
    return Recipe("as it is", settings or TrainingSettings(), callbacks)


@contextmanager
def contest(runs: FakeRuns, settings: TrainingSettings | None = None) -> Iterator[Contest]:
    """Yield a contest of five rounds of turns of a second."""
    with runs.start(recipe(settings)) as base:
        yield Contest(recipe(settings), base, 1.0, 5, runs.start)


def try_change(
    change: Change, behaviour: Behaviour, total_steps: int = 1000, settings: TrainingSettings | None = None
) -> Trial:
    """Compare a change with a run of 1,000 steps of sequences per second, 10 optimizer steps per second."""
    runs = FakeRuns(lambda s: Behaviour() if s == base else behaviour, total_steps)
    base = settings or TrainingSettings()
    with contest(runs, base) as rounds:
        trial = rounds.compare(change)
    assert runs.alive == []
    return trial


def trial_of(change: Change, gain: float, verdict: Verdict = Verdict.FASTER) -> Trial:
    return Trial(change, verdict, "", gain, [gain] * 5, gain, 1.0, 1.0, 0.0)


# --- Alone -------------------------------------------------------------------------------------------------------------


def test_a_change_that_is_faster_in_most_rounds_is_faster():
    trial = try_change(BFLOAT, Behaviour((1100.0, 1050.0, 1100.0, 990.0, 1200.0)))
    assert trial.verdict == Verdict.FASTER
    assert trial.gain == pytest.approx(1.1)
    assert trial.ratios == pytest.approx([1.1, 1.05, 1.1, 0.99, 1.2])


def test_a_gain_of_two_percent_or_less_is_none():
    assert try_change(BFLOAT, Behaviour((1019.0,))).verdict == Verdict.NO_FASTER


def test_a_gain_that_two_rounds_of_five_did_not_see_is_none():
    trial = try_change(BFLOAT, Behaviour((1300.0, 990.0, 1300.0, 990.0, 1300.0)))
    assert trial.verdict == Verdict.NO_FASTER


def test_measuring_stops_when_a_change_cannot_be_found_faster_any_more():
    trial = try_change(UNFUSED, Behaviour((500.0,)))
    assert trial.verdict == Verdict.SLOWER
    assert len(trial.ratios) == 2


def test_other_batches_are_compared_by_their_sums():
    rates = (1010.0, 1010.0, 1010.0, 1010.0, 2000.0)
    assert try_change(BFLOAT, Behaviour(rates)).gain == pytest.approx(1.01)
    assert try_change(BFLOAT._replace(by_totals=True), Behaviour(rates)).gain == pytest.approx(1.208)


def test_the_two_take_turns_at_going_first():
    runs = FakeRuns(lambda s: Behaviour((1000.0,) if s.optimizer.fused_optimizer else (1100.0,)))
    with contest(runs) as rounds:
        rounds.compare(UNFUSED)
    assert runs.turns[:3] == ["as it is", "as it is", "unfused"], "a warm-up each, and a first look at the base"
    assert runs.turns[3:9] == ["as it is", "unfused", "unfused", "as it is", "as it is", "unfused"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError("(bf16-mixed: its process ended with code -9)"), "out of memory"),
        (DivergedError("step 3: the loss is nan"), "step 3: the loss is nan"),
        (MeasuredRunError("bf16-mixed: TypeError: no\nTraceback ..."), "TypeError: no"),
        (SettingsError("--tokens_per_batch 3 is too small"), "--tokens_per_batch 3 is too small"),
    ],
)
def test_a_change_that_cannot_run_fails_with_a_message_of_one_line(error, message):
    trial = try_change(BFLOAT, Behaviour(fails=error))
    assert (trial.verdict, trial.remark, trial.ratios) == (Verdict.FAILED, message, ())


def test_settings_that_exclude_one_another_fail_with_a_message_of_one_line():
    stops = parse_command_line(TrainingSettings, ["--on_collapse", "stop"], prog="x", description="")
    trial = try_change(UNWATCHED, Behaviour(), settings=stops)
    assert trial.verdict == Verdict.FAILED
    assert "--on_collapse stop needs the monitor" in trial.remark


@pytest.mark.parametrize("error", [MeasuredRunError("gone"), MemoryError("(killed)"), DivergedError("nan")])
def test_the_end_of_the_run_itself_during_a_comparison_is_raised_as_what_it_was(error):
    runs = FakeRuns(lambda s: Behaviour(fails=error, fails_at=4) if s.optimizer.fused_optimizer else Behaviour())
    with pytest.raises(type(error)) as raised, contest(runs) as rounds:
        rounds.compare(UNFUSED)
    assert raised.value is error
    assert runs.alive == []


def test_the_failure_of_the_run_itself_is_no_verdict_on_a_change():
    runs = FakeRuns(
        lambda s: Behaviour() if s.compute.compile_model else Behaviour(fails=MeasuredRunError("as it is: gone"))
    )
    with pytest.raises(MeasuredRunError, match="gone"), contest(runs):
        pass
    assert runs.alive == []


@pytest.mark.parametrize(("total_steps", "verdict"), [(2000, Verdict.UNPAID), (3000, Verdict.FASTER)])
def test_compiling_has_to_pay_within_the_run(total_steps, verdict):
    """A gain of 1.1 saves 18 of 200 seconds and 27 of 300; compiling takes 20."""
    trial = try_change(COMPILED, Behaviour((1100.0,), start_seconds=20.0), total_steps)
    assert trial.start_seconds == pytest.approx(20.0)
    assert trial.verdict == verdict


def test_a_time_limit_bounds_what_can_be_saved():
    settings = replace(TrainingSettings(), run=RunSettings(max_time="0:01:40"))
    assert settings.run.time_limit == timedelta(seconds=100)
    trial = try_change(COMPILED, Behaviour((1100.0,), start_seconds=20.0), 10**6, settings)
    assert (trial.verdict, trial.remark) == (
        Verdict.UNPAID,
        "its start takes 20 s, and in this run of 100 s it saves 9 s",
    )


def test_noise_of_a_start_is_no_price():
    trial = try_change(BFLOAT, Behaviour((1100.0,), start_seconds=1.9), total_steps=10)
    assert trial.verdict == Verdict.FASTER


# --- Measured again ----------------------------------------------------------------------------------------------------


def test_the_fastest_of_each_theme_are_measured_together_and_the_best_alone():
    trials = [
        trial_of(BFLOAT, 1.1),
        trial_of(BFLOAT._replace(name="16-mixed", values={"precision": "16-mixed"}), 1.3),
        trial_of(COMPILED, 1.2),
        trial_of(UNFUSED, 1.01, Verdict.NO_FASTER),
    ]
    together, best_alone = worth_measuring_again(trials)
    assert (together.name, best_alone.name) == ("16-mixed + compiled", "16-mixed")
    assert together.values == {"precision": "16-mixed", "compile_model": True}
    assert together.effect == "numbers are rounded more"


def test_two_changes_of_one_setting_do_not_combine():
    other = Change("other", "another theme", {"precision": "32-true"}, "none")
    with pytest.raises(AssertionError, match="two changes of one setting"):
        worth_measuring_again([trial_of(BFLOAT, 1.1), trial_of(other, 1.2)])


def test_nothing_is_measured_again_where_nothing_was_faster():
    assert worth_measuring_again([trial_of(BFLOAT, 0.9, Verdict.SLOWER)]) == []


def advice_of(words: list[str], monkeypatch: pytest.MonkeyPatch, rates: dict[str, tuple[float, ...]]) -> Advice:
    """Let the changes COMPILED and BFLOAT compete; `rates` are those of the starts of each named run, one after another."""
    monkeypatch.setattr(advise_module, "changes_for", lambda *_: [COMPILED, BFLOAT])
    left = {name: list(all_rates) for name, all_rates in rates.items()}

    def behaviour(settings: TrainingSettings) -> Behaviour:
        parts = {"compiled": settings.compute.compile_model, "bf16-mixed": settings.compute.precision == "bf16-mixed"}
        name = " + ".join(part for part, is_on in parts.items() if is_on)
        return Behaviour((left[name].pop(0),)) if name else Behaviour()

    advice, _ = advice_on([*words, "--no_compile_model", "--precision", "32-true"], FakeRuns(behaviour))
    return advice


@pytest.mark.parametrize(("both", "proposed"), [(1300.0, "compiled + bf16-mixed"), (1100.0, "compiled")])
def test_the_faster_of_all_together_and_the_best_alone_is_proposed(words, monkeypatch, both, proposed):
    rates = {"compiled": (1250.0, 1200.0), "bf16-mixed": (1050.0,), "compiled + bf16-mixed": (both,)}
    advice = advice_of(words, monkeypatch, rates)
    assert [trial.change.name for trial in advice.together] == ["compiled + bf16-mixed", "compiled"]
    assert advice.best is not None
    assert advice.best.change.name == proposed
    assert advice.best.gain == pytest.approx(max(both / 1000, 1.2))


def test_luck_that_does_not_come_again_is_not_proposed(words, monkeypatch):
    advice = advice_of(words, monkeypatch, {"compiled": (1100.0, 1000.0), "bf16-mixed": (900.0,)})
    assert (len(advice.together), advice.best) == (1, None)
    assert "--compile_model" not in advice.command.split()
    text = " ".join("\n".join(advice_lines(advice.as_dict(), Ink(width=200))).split())
    assert "was not when it was measured again" in text


# --- The whole ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Words for a tiny model on tiny data, without a monitor."""
    folder = tmp_path_factory.mktemp("tiny")
    data = write_demo(folder, "tokens", sequences=300, mean_length=12)
    model = "--width 8 --depth 1 --heads 1 --latent_size 2 --max_sequence_length 40 --disable_metrics_monitoring"
    return ["--data_dir", str(data), "--cache_dir", str(folder / "cache"), *model.split()]


def advice_on(words: list[str], runs: FakeRuns) -> tuple[Advice, list[str]]:
    settings = parse_command_line(OptimizedSettings, words, prog="x", description="")
    lines: list[str] = []
    return advise(recipe(settings), words, prog="python train_optimized.py", say=lines.append, start=runs.start), lines


def typed_settings(advice: Advice) -> OptimizedSettings:
    return parse_command_line(OptimizedSettings, shlex.split(advice.command)[2:], prog="x", description="")


def by_compiling(settings: TrainingSettings) -> Behaviour:
    """Return a run that is twice as fast when compiled, and half as fast with more accumulation."""
    rate = 2000.0 if settings.compute.compile_model else 1000.0
    return Behaviour((rate / (1 + (settings.optimizer.gradient_accumulation_steps > 2)),))


def test_the_command_is_the_users_own_with_what_was_faster(words):
    runs = FakeRuns(by_compiling)
    advice, _ = advice_on([*words, "--no_compile_model"], runs)
    assert advice.command.split() == ["python", "train_optimized.py", *words, "--compile_model"]
    assert advice.best is not None
    assert advice.best.gain == pytest.approx(2.0)
    assert typed_settings(advice) == runs.started[-1]


def test_at_most_two_runs_are_alive(words):
    runs = FakeRuns(by_compiling)
    advice_on(words, runs)
    assert (runs.most_alive, runs.alive) == (2, [])


def test_if_nothing_is_faster_the_command_stays_and_a_line_says_so(words):
    advice, _ = advice_on(words, FakeRuns(lambda _: Behaviour()))
    assert (advice.best, advice.together) == (None, [])
    assert advice.command.split() == ["python", "train_optimized.py", *words]
    text = "\n".join(advice_lines(advice.as_dict(), Ink(width=100)))
    assert f"None of {len(advice.alone)} changes may be proposed as faster" in text


def test_each_trial_prints_a_line_when_it_is_done(words):
    advice, lines = advice_on(words, FakeRuns(by_compiling))
    assert len(lines) == 1 + len(advice.alone) + len(advice.together)


def test_advice_is_plain_json(words):
    advice, _ = advice_on(words, FakeRuns(by_compiling))
    content = json.loads(json.dumps(advice.as_dict(), allow_nan=False))
    assert content["best"]["flags"] == "--compile_model"
    assert content["best"]["values"] == {"compile_model": True}
    assert content["best"]["gain"] == pytest.approx(2.0)


def test_the_table_to_the_letter():
    faster = trial_of(BFLOAT, 1.25)
    advice = Advice(
        unit="tokens",
        base_rate=1000.0,
        base_spread=0.01,
        base_memory_gib=1.0,
        run_seconds=600.0,
        alone=[
            trial_of(BFLOAT, 1.3),
            Trial(COMPILED, Verdict.FAILED, remark="out of memory"),
        ],
        together=[faster],
        best=faster,
        command="python train_optimized.py --precision bf16-mixed",
        seconds=60.0,
    )
    assert advice_lines(advice.as_dict(), Ink(width=80)) == [
        "",
        "Each change alone",
        "  change      gain   spread     memory   verdict",
        "  bf16-mixed  1.30x  1.30-1.30  1.0 GiB  faster",
        "      --precision bf16-mixed",
        "      numbers are rounded more",
        "  compiled    -      -          -        failed",
        "      --compile_model",
        "      out of memory",
        "",
        "Measured again",
        "  change      gain   spread     memory   verdict",
        "  bf16-mixed  1.25x  1.25-1.25  1.0 GiB  faster",
        "      --precision bf16-mixed",
        "      numbers are rounded more",
        "",
        "  As it is: 1,000 real tokens/s, 1.0 GiB; training would take 10 min. Faster: by",
        "  more than 2 %, and in three quarters of the rounds. Spread: the middle half of",
        "  the rounds.",
        "",
        "Advice",
        "  1.25 times as fast (1.25 to 1.25 in the middle half of 5 rounds), 1.0 GiB.",
        "  What it changes beside: numbers are rounded more.",
        "  python train_optimized.py --precision bf16-mixed",
    ]


def test_a_busy_machine_is_mentioned(words):
    quiet, _ = advice_on(words, FakeRuns(lambda _: Behaviour((1000.0, 1010.0))))
    busy, _ = advice_on(words, FakeRuns(lambda _: Behaviour((1000.0, 1500.0))))
    warned = ["not equally fast" in " ".join(advice_lines(a.as_dict(), Ink())) for a in (quiet, busy)]
    assert warned == [False, True]


def test_real_runs_are_compared(words, monkeypatch):
    """A batch for each sequence is slower than batches of many, whatever else the machine does."""
    one_by_one = Change("one by one", "batches", {"batch_size": 1}, "none", by_totals=True)
    refused = Change("too small", "batches", {"tokens_per_batch": 1}, "none")
    monkeypatch.setattr(advise_module, "changes_for", lambda *_: [one_by_one, refused])
    settings = parse_command_line(OptimizedSettings, words, prog="x", description="")
    advice = advise(
        recipe(settings), words, prog="python train_optimized.py", seconds_per_turn=0.1, rounds=3, say=lambda _: None
    )
    slow, too_small = advice.alone
    assert (slow.verdict, too_small.verdict) == (Verdict.SLOWER, Verdict.FAILED)
    assert slow.gain < 0.7
    assert "--tokens_per_batch 1 is less than the longest sequence" in too_small.remark
    assert advice.best is None
