"""--logger: nothing for csv, a clear word where a package is missing, and values that really arrive where it is there."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lightning.pytorch.loggers import Logger

from seqvae.config.run import RunSettings
from seqvae.errors import UsageError
from seqvae.training.trainer import make_logger


def log_a_little(logger: Logger | None) -> Any:
    """Any: each logger has attributes of its own."""
    assert logger is not None
    logger.log_hyperparams({"lr": 0.5, "target_kl": None})
    logger.log_metrics({"loss": 2.0, "kl": 0.25}, step=50)
    logger.log_metrics({"loss": 1.0}, step=100)
    logger.finalize("success")
    return logger


def test_csv_needs_no_logger(tmp_path):
    assert make_logger(RunSettings(logger="csv"), tmp_path / "first") is None


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_said_with_the_way_to_get_it(tmp_path, monkeypatch, name):
    monkeypatch.setattr("seqvae.training.trainer.find_spec", lambda package: None)
    with pytest.raises(UsageError, match=rf"--logger {name} .*pip install -e '\.\[loggers\]'"):
        make_logger(RunSettings(logger=name), tmp_path / "first")


def tensorboard_values(folder: Path) -> list[tuple[str, int, float]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return [(tag, value.step, value.value) for tag in events.Tags()["scalars"] for value in events.Scalars(tag)]


@pytest.mark.parametrize("log_dir", [None, "shared"])
def test_tensorboard_finds_the_values_in_the_runs_directory_or_under_its_name(tmp_path, log_dir):
    pytest.importorskip("tensorboard", reason="the extra 'loggers' is not installed")
    shared = None if log_dir is None else str(tmp_path / log_dir)
    log_a_little(make_logger(RunSettings(logger="tensorboard", log_dir=shared), tmp_path / "first"))
    folder = tmp_path / "first" / "tensorboard" if log_dir is None else tmp_path / "shared" / "first"
    assert sorted(tensorboard_values(folder)) == [("kl", 50, 0.25), ("loss", 50, 2.0), ("loss", 100, 1.0)]


def test_a_resumed_run_goes_on_in_the_same_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra 'loggers' is not installed")
    for _ in range(2):
        log_a_little(make_logger(RunSettings(logger="tensorboard"), tmp_path / "first"))
    assert [path.name for path in (tmp_path / "first").iterdir()] == ["tensorboard"]


def test_mlflow_keeps_the_values_in_the_runs_directory(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="the extra 'loggers' is not installed")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    logger = log_a_little(make_logger(RunSettings(logger="mlflow"), tmp_path / "first"))
    assert (tmp_path / "first" / "mlruns").is_dir()
    run = logger.experiment.get_run(logger.run_id)
    assert run.info.run_name == "first"
    assert (run.data.metrics["loss"], run.data.params["lr"]) == (1.0, "0.5")


def test_wandb_keeps_an_offline_run_in_the_runs_directory(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="the extra 'loggers' is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    logger = log_a_little(make_logger(RunSettings(logger="wandb"), tmp_path / "first"))
    run = logger.experiment
    assert (run.name, run.config["lr"], run.summary["loss"]) == ("first", 0.5, 1.0)
    wandb.finish()
    assert list((tmp_path / "first" / "wandb").glob("offline-run-*"))


def test_wandb_without_a_key_is_refused_in_a_line_that_says_how_to_go_on(tmp_path, monkeypatch):
    errors = ModuleType("wandb.errors")
    errors.Error = type("Error", (Exception,), {})  # type: ignore[attr-defined]

    class Keyless:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        @property
        def experiment(self) -> None:
            raise errors.Error("api_key not configured (no-tty). call wandb.login(key=[your_api_key])\nand more")

    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    monkeypatch.setitem(sys.modules, "wandb.errors", errors)
    monkeypatch.setattr("seqvae.training.trainer.find_spec", lambda package: True)
    monkeypatch.setattr("seqvae.training.trainer.WandbLogger", Keyless)
    with pytest.raises(UsageError, match=r"^--logger wandb: api_key not configured .* WANDB_MODE=offline") as refused:
        make_logger(RunSettings(logger="wandb"), tmp_path / "first")
    assert "\n" not in str(refused.value)
