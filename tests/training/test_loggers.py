"""--logger: nothing for csv, a clear word where a package is missing, and all that a run keeps, where it is there.

What a package has kept is read by its own reader, without a network.
"""

import json
import re
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from lightning.pytorch.loggers import Logger

import seqvae
from seqvae.config.run import RunSettings
from seqvae.errors import UsageError
from seqvae.files import read_rows
from seqvae.training.trainer import make_logger
from seqvae.verdicts import readable

NEEDS = "the extra 'loggers' is not installed"
FIGURES = {"timeline", "kl_per_dim", "active_units", "posterior_means", "posterior_pca"}


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


@pytest.mark.slow
@pytest.mark.parametrize("log_dir", [None, "shared"])
def test_tensorboard_finds_the_values_in_the_runs_directory_or_under_its_name(tmp_path, log_dir):
    pytest.importorskip("tensorboard", reason=NEEDS)
    shared = None if log_dir is None else str(tmp_path / log_dir)
    log_a_little(make_logger(RunSettings(logger="tensorboard", log_dir=shared), tmp_path / "first"))
    folder = tmp_path / "first" / "tensorboard" if log_dir is None else tmp_path / "shared" / "first"
    assert sorted(tensorboard_values(folder)) == [("kl", 50, 0.25), ("loss", 50, 2.0), ("loss", 100, 1.0)]


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason=NEEDS)
    for _ in range(2):
        log_a_little(make_logger(RunSettings(logger="tensorboard"), tmp_path / "first"))
    assert [path.name for path in (tmp_path / "first").iterdir()] == ["tensorboard"]


@pytest.mark.slow
def test_mlflow_keeps_the_values_in_the_runs_directory(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason=NEEDS)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    logger = log_a_little(make_logger(RunSettings(logger="mlflow"), tmp_path / "first"))
    assert (tmp_path / "first" / "mlruns").is_dir()
    run = logger.experiment.get_run(logger.run_id)
    assert run.info.run_name == "first"
    assert (run.data.metrics["loss"], run.data.params["lr"]) == (1.0, "0.5")


@pytest.mark.slow
def test_wandb_keeps_an_offline_run_in_the_runs_directory(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason=NEEDS)
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


# --- All of a run -------------------------------------------------------------------------------------------------------

NETWORK = {"tokenizer": "characters", "width": 16, "depth": 1, "heads": 1, "latent_size": 2, "precision": "32-true"}
SOON_HEALTHY = {"lr": 0.02, "warmup": 2, "beta": 0.05, "kl_schedule": "constant", "fast_detection": True}
SMALL: dict[str, Any] = {**NETWORK, **SOON_HEALTHY, "num_workers": 0, "max_steps": 40, "plot_every_n_steps": 20}


class Kept(NamedTuple):
    """What is left of a run, by steps."""

    rates: dict[int, float]
    verdicts: dict[int, str]
    figures: set[str]
    samples: dict[int, str]


def kept_in_files(run: Path) -> Kept:
    rows = read_rows(run / "posterior.jsonl")
    events = [row for row in read_rows(run / "events.jsonl") if row["event"] == "verdict"]
    return Kept(
        {row["step"]: row["rate"] for row in rows},
        {row["step"]: f"step {row['step']}: {readable(row['verdict'])}: {row['evidence']}" for row in events},
        {path.stem for path in (run / "plots").glob("*.png")},
        {int(path.stem.removeprefix("step-")): path.read_text("utf-8") for path in (run / "samples").glob("*.txt")},
    )


def kept_in_tensorboard(run: Path) -> Kept:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=NEEDS)
    events = accumulator.EventAccumulator(str(run / "tensorboard")).Reload()

    def texts(tag: str) -> dict[int, str]:
        found = events.Tensors(f"{tag}/text_summary")
        return {one.step: one.tensor_proto.string_val[0].decode() for one in found}

    pictures = {tag: events.Images(tag)[-1] for tag in events.Tags()["images"]}
    assert all(one.width > 500 and one.height > 200 for one in pictures.values())
    return Kept(
        {one.step: one.value for one in events.Scalars("posterior/rate")},
        texts("posterior/verdicts"),
        {tag.removeprefix("posterior_figures/") for tag in pictures},
        {step: re.sub("^    ", "", text, flags=re.MULTILINE) for step, text in texts("samples").items()},
    )


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline run, in LevelDB's format of logs, for which the package has no reader but its upload."""
    read = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason=NEEDS).Record.FromString
    content, block = path.read_bytes(), 2**15
    place, record = 7, b""  # behind the file's header
    while place + 7 <= len(content):
        if block - place % block < 7:  # no room for the header of a part
            place += block - place % block
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        place += 7 + length
        record += content[place - length : place]
        if kind in (1, 4):  # whole, or the last part
            yield read(record)
            record = b""


def kept_in_wandb(run: Path) -> Kept:
    (folder,) = (run / "wandb").glob("offline-run-*")
    (path,) = folder.glob("*.wandb")
    records = list(wandb_records(path))

    def values(items: Iterable[Any]) -> dict[str, Any]:
        return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}

    def column(name: str) -> dict[int, Any]:
        rows = (values(record.history.item) for record in records)
        return {row["trainer/global_step"]: row[name] for row in rows if name in row}

    def texts(name: str) -> dict[int, str]:
        tables = {step: folder / "files" / table for step, table in column(f"{name}/path").items()}
        return {step: json.loads(path.read_text("utf-8"))["data"][0][1] for step, path in tables.items()}

    names = {name for record in records for name in values(record.history.item)}
    figures = {name for name in names if re.fullmatch("posterior_figures/.*/filenames", name)}
    for name in figures:
        for (picture,) in column(name).values():
            assert (folder / "files" / picture).read_bytes().startswith(b"\x89PNG")
    assert "healthy" in [values(record.summary.update).get("posterior/verdict") for record in records]
    return Kept(
        column("posterior/rate"),
        texts("posterior/verdicts"),
        {name.split("/")[1] for name in figures},
        texts("samples"),
    )


def kept_in_mlflow(run: Path) -> Kept:
    mlflow = pytest.importorskip("mlflow", reason=NEEDS)
    client = mlflow.MlflowClient((run / "mlruns").as_uri())
    (found,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    number = found.info.run_id
    assert found.data.tags["posterior/verdict"] == "healthy"

    def texts(folder: str) -> dict[int, str]:
        paths = [Path(client.download_artifacts(number, one.path)) for one in client.list_artifacts(number, folder)]
        return {int(path.stem.removeprefix("step-")): path.read_text("utf-8") for path in paths}

    pictures = [one.path for one in client.list_artifacts(number, "images") if one.path.endswith(".png")]
    return Kept(
        {one.step: one.value for one in client.get_metric_history(number, "posterior/rate")},
        texts("posterior/verdicts"),
        {name for path in pictures for name in FIGURES if re.search(rf"posterior_figures.{name}.step.40\b", path)},
        texts("samples"),
    )


KEPT = {"csv": kept_in_files, "tensorboard": kept_in_tensorboard, "wandb": kept_in_wandb, "mlflow": kept_in_mlflow}


@pytest.mark.draws
@pytest.mark.parametrize(
    "name", [name if name == "csv" else pytest.param(name, marks=pytest.mark.slow) for name in KEPT]
)
def test_readings_verdicts_figures_and_samples_are_kept(name, tmp_path, monkeypatch):
    if name != "csv":
        pytest.importorskip(name, reason=NEEDS)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for variable in ("WANDB_RUN_ID", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(variable, raising=False)
    run = seqvae.fit(
        ["abcde"[number % 5] * (4 + number % 3) for number in range(120)],
        **SMALL,
        logger=name,
        output_dir=str(tmp_path / "runs"),
        cache_dir=str(tmp_path / "cache"),
        run_name="mine",
    ).directory
    if name == "wandb":
        sys.modules["wandb"].finish()
    expected, kept = kept_in_files(run), KEPT[name](run)
    assert kept.rates == pytest.approx(expected.rates, rel=1e-6)
    assert (kept.verdicts, kept.samples) == (expected.verdicts, expected.samples)
    assert kept.figures == FIGURES
    assert list(expected.rates)[-1] == max(expected.samples) == 40
    assert "healthy" in next(iter(expected.verdicts.values()))
    assert "Drawn from the prior" in expected.samples[40]
