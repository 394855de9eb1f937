"""Studies: which trials there are, what becomes of those that collapse, fail or are interrupted, and what is on the front."""

import json
import signal
import subprocess
import sys
import time
from datetime import datetime
from itertools import product
from pathlib import Path

import pytest

import seqvae
from seqvae import tuning
from seqvae.config.flags import CommandLine
from seqvae.config.tuning import RANGES, Choices, Range, StudySettings, parse_space
from seqvae.errors import DataError, ExitCode, UsageError
from seqvae.reports.study_page import read_study
from tests.support.launched import ROOT, environment

optuna = pytest.importorskip("optuna", reason="the extra tune is not installed")

SPACE = "lr=1e-4:1e-2,latent_size=4|8|16,beta=0.5:2"


def settings_of(folder: Path, words: str = "", *, space: str = SPACE, trials: int = 5) -> StudySettings:
    line = CommandLine(StudySettings)
    own = ["--output_dir", str(folder), "--run_name", "study", "--space", space, "--trials", str(trials)]
    return line.settings(line.read_words([*own, *words.split()]))


def silent(line: str) -> None:
    """Take a line of progress."""


class Runs:
    """Trials that take no time: the ELBO is best at a rate of 0.002, the latent knows what it has dimensions for, and those with a
    KL weight above 1.5 collapse."""

    def __init__(self) -> None:
        self.orders: list[tuning.Order] = []
        self.codes: dict[int, int] = {}
        """Exit codes, by number of the trial."""

    def __call__(self, order: tuning.Order) -> tuning.Outcome:
        self.orders.append(order)
        code = self.codes.get(order.number, 7 if float(order.values["beta"]) > 1.5 else 0)
        if code == ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        elbo = -(abs(float(order.values["lr"]) - 0.002) * 1e4)
        known = 0.0 if code == 7 else float(order.values["latent_size"])
        order.directory.mkdir(exist_ok=True)
        rows = [{"name": "ELBO", "value": elbo}, {"name": "mutual information", "value": known}]
        (order.directory / tuning.OBJECTIVES).write_text(json.dumps({"rows": rows}))
        return tuning.Outcome(order, code, 1.5, f"ended with {code}")


@pytest.fixture
def runs(monkeypatch) -> Runs:
    fake = Runs()
    monkeypatch.setattr(tuning, "run_trial", fake)
    monkeypatch.setattr("seqvae.reports.study_page.study_page", lambda study, now: "")  # its figures take a second
    return fake


# --- The space -------------------------------------------------------------------------------------------------------------


def test_a_space_is_ranges_and_choices_and_each_default_is_one_that_runs_take():
    space = parse_space(" lr=1e-4:1e-2, latent-size=8|16,decoder, bucketing,--depth=1:3")
    assert space == {
        "lr": Range(1e-4, 1e-2, False),
        "latent_size": Choices(("8", "16")),
        "decoder": Choices(("transformer", "lstm", "tcn", "parallel")),
        "bucketing": Choices(("false", "true")),
        "depth": Range(1, 3, True),
    }
    assert (Range(1e-4, 1e-2, False).is_logarithmic, Range(1, 3, True).is_logarithmic) == (True, False)
    assert parse_space(",".join(RANGES)).keys() == RANGES.keys()


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (
            "latent_sizes",
            "--space latent_sizes: no setting of model, objective, optimizer or batches; did you mean latent_size?",
        ),
        ("data_dir=a|b", "--space data_dir: no setting of model"),
        ("lr=0.1", "one value is no choice. Give it as --lr 0.1"),
        ("lr=1e-2:1e-4", "a range goes from a number to a higher one"),
        ("lr=0:1", "--space lr: lr must be above 0, got 0"),
        ("decoder=lstm|gru", "--space decoder: decoder wants transformer, lstm, tcn or parallel, got 'gru'"),
        ("decoder=1:2", "takes no numbers, but transformer, lstm, tcn or parallel, as a|b"),
        ("latent_size=1.5:4", "latent_size wants a whole number, got '1.5'"),
        ("lr,lr", "--space names lr twice"),
        ("batch_size", "say from where to where, as batch_size=1:8"),
        (" ", "names no setting"),
    ],
)
def test_a_space_that_runs_would_refuse_is_refused_at_once(tmp_path, space, said):
    with pytest.raises(UsageError) as refusal:
        _ = settings_of(tmp_path, space=space).space
    assert said in str(refusal.value)


def test_what_goes_with_the_other_settings_only_is_refused_without_them(tmp_path):
    with pytest.raises(UsageError, match="need each other"):
        _ = settings_of(tmp_path, space="free_bits_group=2|4").space
    words = "--free_bits_by group --free_bits_group 8"
    assert settings_of(tmp_path, words, space="free_bits_group=2|4").space == {"free_bits_group": Choices(("2", "4"))}


# --- The study -------------------------------------------------------------------------------------------------------------


def test_the_front_is_what_no_trial_surpasses_and_holds_none_that_collapsed(tmp_path, runs):
    told: list[str] = []
    directory = tuning.tune(settings_of(tmp_path, trials=9), told.append)
    study = read_study(directory)
    assert [one.name for one in study.trials] == [f"trial-{number:03d}" for number in range(9)]
    well = [one for one in study.trials if one.state == "finished"]
    assert {one.state for one in study.trials} == {"finished", "collapsed"}
    surpassed = {
        one.name
        for one, other in product(well, well)
        if all(a <= b for a, b in zip(one.objectives, other.objectives, strict=True))
        and one.objectives != other.objectives
    }
    assert {one.name for one in study.front} == {one.name for one in well} - surpassed
    assert len(told) == 9


def test_the_first_trial_has_the_settings_as_they_are_typed(tmp_path, runs):
    tuning.tune(settings_of(tmp_path, "--lr 0.004 --latent_size 8", trials=1), silent)
    assert {name: float(value) for name, value in runs.orders[0].values.items()} == {
        "lr": 0.004,
        "latent_size": 8,
        "beta": 1,
    }
    assert runs.orders[0].train[-6:] == [
        word for pair in runs.orders[0].values.items() for word in (f"--{pair[0]}", pair[1])
    ]


def test_an_interrupted_study_goes_on_with_the_trial_that_it_was_at(tmp_path, runs):
    runs.codes[3] = ExitCode.INTERRUPTED
    with pytest.raises(KeyboardInterrupt):
        tuning.tune(settings_of(tmp_path), silent)
    assert [one.state for one in read_study(tmp_path / "study").trials][3:] == ["unfinished"]
    at = runs.orders[3].values
    runs.codes.clear()
    tuning.tune(settings_of(tmp_path), silent)
    assert [order.number for order in runs.orders] == [0, 1, 2, 3, 3, 4]
    assert runs.orders[4].values == at
    assert len({order.values["lr"] for order in runs.orders}) == 5
    tuning.tune(settings_of(tmp_path, trials=7), silent)
    assert [order.number for order in runs.orders][6:] == [5, 6]


def test_a_trial_that_fails_by_its_settings_is_marked_and_the_study_goes_on(tmp_path, runs):
    runs.codes |= {2: ExitCode.OUT_OF_MEMORY, 3: ExitCode.DIVERGED, 4: ExitCode.USAGE}
    study = read_study(tuning.tune(settings_of(tmp_path), silent))
    assert [one.state for one in study.trials][2:5] == ["failed"] * 3
    assert (study.trials[2].said, study.trials[2].objectives) == ("ended with 5", ())


@pytest.mark.parametrize(("code", "error"), [(ExitCode.DATA, DataError), (ExitCode.USAGE, UsageError)])
def test_what_every_trial_would_fail_by_ends_the_study_and_costs_no_trial(tmp_path, runs, code, error):
    runs.codes[0] = code
    with pytest.raises(error, match=f"trial-000: ended with {code:d}"):
        tuning.tune(settings_of(tmp_path, trials=2), silent)
    runs.codes.clear()
    tuning.tune(settings_of(tmp_path, trials=2), silent)
    assert [order.number for order in runs.orders] == [0, 0, 1]


@pytest.mark.parametrize(
    ("words", "space", "said"),
    [
        ("--depth 3", SPACE, "its trials had another --depth, and could not be compared"),
        ("--probe label", SPACE, "this study is about ELBO and mutual information"),
        ("", "lr", "its trials chose lr, latent_size, beta"),
    ],
)
def test_trials_that_could_not_be_compared_are_not_put_into_one_study(tmp_path, runs, words, space, said):
    tuning.tune(settings_of(tmp_path, trials=1), silent)
    with pytest.raises(UsageError, match=said):
        tuning.tune(settings_of(tmp_path, words, space=space, trials=2), silent)
    tuning.tune(settings_of(tmp_path, space="lr=1e-3:1e-2,latent_size=4|8|16,beta=0.5:1", trials=2), silent)
    assert float(runs.orders[1].values["lr"]) >= 1e-3


def test_a_study_has_a_name_and_one_command_at_a_time(tmp_path, runs, monkeypatch):
    line = CommandLine(StudySettings)
    with pytest.raises(UsageError, match="give it --run_name"):
        tuning.tune(line.settings([]), silent)

    def again(_: tuning.Order) -> tuning.Outcome:
        tuning.tune(settings_of(tmp_path), silent)
        raise AssertionError

    monkeypatch.setattr(tuning, "run_trial", again)
    with pytest.raises(UsageError, match="another command works on this study"):
        tuning.tune(settings_of(tmp_path), silent)


def test_from_python_a_study_is_tables_and_runs(tmp_path, runs):
    space = {"lr": "1e-4:1e-2", "latent_size": [4, 8, 16], "beta": "0.5:2"}
    study = seqvae.tune(space=space, trials=5, run_name="study", output_dir=str(tmp_path), depth=1)
    assert runs.orders[0].train[:2] == ["--config", str(tmp_path / "study" / "settings.yaml")]
    assert "depth: 1\n" in (tmp_path / "study" / "settings.yaml").read_text()
    assert list(study.trials.columns[:5]) == ["lr", "latent_size", "beta", "ELBO", "mutual information"]
    assert set(study.trials["latent_size"]) <= {4, 8, 16}
    assert study.front["ELBO"].is_monotonic_decreasing
    assert study.run(study.front.index[0]).directory == tmp_path / "study" / study.front.index[0]
    assert "5 trials" in repr(seqvae.Study(study.directory))
    with pytest.raises(UsageError, match="'trial-7' is no trial of"):
        study.run("trial-7")


# --- A trial ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def order(tmp_path) -> tuning.Order:
    return tuning.Order(0, {"lr": "0.001"}, tmp_path / "trial-000", ["--lr", "0.001"], ["--split", "valid"])


@pytest.mark.parametrize(("code", "checkpoint"), [(0, ""), (7, "checkpoints/last.ckpt")])
def test_what_is_evaluated_is_the_best_model_and_of_a_collapsed_run_the_one_it_ended_with(
    order, monkeypatch, code, checkpoint
):
    called: list[list[str]] = []

    def call(words: list[str], log: object) -> tuple[int, str]:
        called.append(words)
        return (code, "collapsed") if words[0] == "train" else (0, "")

    monkeypatch.setattr(tuning, "_call", call)
    outcome = tuning.run_trial(order)
    assert (outcome.exit_code, called[0]) == (code, ["train", "--lr", "0.001"])
    output = ["--split", "valid", "--json", str(order.directory / "objectives.json")]
    assert called[1] == ["evaluate", str(order.directory / checkpoint), *output]


def test_a_trial_that_the_monitor_stopped_is_not_trained_on_when_a_study_goes_on(order, monkeypatch):
    order.directory.mkdir()
    (order.directory / "events.jsonl").write_text('{"event": "started", "step": 0}\n{"event": "stopped", "step": 9}\n')
    called: list[list[str]] = []

    def call(words: list[str], log: object) -> tuple[int, str]:
        called.append(words)
        return 0, ""

    monkeypatch.setattr(tuning, "_call", call)
    assert tuning.run_trial(order).exit_code == ExitCode.COLLAPSED
    assert [words[0] for words in called] == ["evaluate"]


def test_a_command_that_fails_says_its_last_line(order, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    outcome = tuning.run_trial(order._replace(train=["--lr", "-1"]))
    assert (outcome.exit_code, outcome.said) == (2, "seqvae train: --lr must be above 0, got -1.0")
    assert "--lr must be above 0" in order.directory.with_suffix(".log").read_text()


# --- Real runs -------------------------------------------------------------------------------------------------------------

REAL = (
    "--kind tokens --max_steps 60 --width 16 --depth 1 --heads 2 --num_workers 0 --precision 32 --monitor_every_n_steps 4 "
    "--run_name study --trials 2"
)


def study_of_real_runs(tmp_path: Path, words: str, variables: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    places = ["--output_dir", str(tmp_path / "runs"), "--cache_dir", str(tmp_path / "cache")]
    line = [sys.executable, "-m", "seqvae", "tune", *REAL.split(), *words.split(), *places]
    own = environment(variables or {})
    return subprocess.Popen(line, env=own, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_a_killed_study_goes_on_and_its_trials_are_runs_as_any_other(tmp_path):
    space = "--space lr=1e-3:1e-2"
    process = study_of_real_runs(tmp_path, space)
    log = tmp_path / "runs/study/trial-000.log"
    until = time.monotonic() + 240
    while not (log.exists() and "step" in log.read_text()) and time.monotonic() < until:
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    time.sleep(5)  # the trial saves what it has, as its parent is gone
    output, errors = study_of_real_runs(tmp_path, space).communicate()
    assert output.endswith(f"{tmp_path}/runs/study/index.html\n"), errors
    study = seqvae.Study(tmp_path / "runs/study")
    assert list(study.trials["state"]) == ["finished", "finished"]
    assert (study.directory / "index.html").read_text().count('<a href="./trial-') == 2
    for name in study.trials.index:
        run = study.run(name)
        assert run.metrics["step"].max() == 60
        assert run.model.evaluate(split="valid", iw_sequences=0)["rows"][0]["value"] == pytest.approx(
            study.trials.loc[name, "ELBO"], rel=1e-6
        )


@pytest.mark.slow
def test_trials_run_side_by_side_on_ray(tmp_path):
    pytest.importorskip("ray", reason="the extra ray is not installed")
    from tests.support.ray_cluster import cluster

    with cluster(2) as nodes:
        words = "--space lr=1e-3:1e-2 --launcher ray --ray_workers 2"
        output, errors = study_of_real_runs(tmp_path, words, dict(nodes.variables)).communicate()
    assert output.endswith("index.html\n"), errors
    study = seqvae.Study(tmp_path / "runs/study")
    assert list(study.trials["state"]) == ["finished", "finished"]
    begins = [(study.directory / name / "events.jsonl").read_text().splitlines()[0] for name in study.trials.index]
    begun = [datetime.fromisoformat(json.loads(line)["time"]).timestamp() for line in begins]
    ended = [(study.directory / name / "objectives.json").stat().st_mtime for name in study.trials.index]
    assert max(begun) < min(ended)
