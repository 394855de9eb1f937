"""The training scripts show their whole wiring: it trains what `fit` trains by itself, and comments name the values in force."""

import json
import re
import sys
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import train_optimized
import train_with_collapse_detection
from benchmarks.reliability.same_run import differences_of_runs
from seqvae.cli.command_line import parse_command_line
from seqvae.config.monitoring import Watch
from seqvae.config.training import OptimizedSettings, ReferenceSettings, TrainingSettings
from seqvae.config.yaml_files import to_flat_dict
from seqvae.data.demo import write_demo
from seqvae.training.distributed import resolve_devices
from seqvae.training.fit import fit, make_data, make_monitors, prepare_settings
from seqvae.training.trainer import NoProfiler, default_trainer_arguments, make_pictures

# Lightning 2.6.6 calls torch 2.13 in a way that torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")

SCRIPTS = [(train_optimized, OptimizedSettings), (train_with_collapse_detection, ReferenceSettings)]
TINY = "--width 16 --heads 2 --depth 1 --max_steps 12 --log_every_n_steps 3 --monitor_every_n_steps 3 --val_check_interval 5"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("demo"), "tokens", sequences=200, mean_length=15)


def words(data_dir: Path, directory: Path, name: str) -> list[str]:
    places = ["--data_dir", data_dir, "--cache_dir", data_dir / "cache", "--output_dir", directory, "--run_name", name]
    return [*TINY.split(), *map(str, places)]


@pytest.mark.parametrize(("script", "schema"), SCRIPTS)
def test_the_script_trains_to_the_same_weights_as_fit_alone(
    script: Any, schema: type[TrainingSettings], data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [script.PROG, *words(data_dir, tmp_path, "script")])
    script.main()
    result = fit(parse_command_line(schema, words(data_dir, tmp_path, "fit"), prog="fit", description=""))
    assert result.directory == tmp_path / "fit"
    assert differences_of_runs(tmp_path / "script", tmp_path / "fit") == []
    one, other = (
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for name in ("script", "fit")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(weights, other[name]) for name, weights in one.items())
    assert (tmp_path / "script" / "samples").exists()


@pytest.mark.parametrize(("script", "schema"), SCRIPTS)
@pytest.mark.parametrize(
    "more", [[], ["--fast_detection"], ["--disable_metrics_monitoring"], ["--use_dynamic_padding=false"]]
)
def test_the_script_hands_over_what_fit_would_build(
    script: Any, schema: type[TrainingSettings], more: list[str], data_dir: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    handed: list[Any] = []
    monkeypatch.setattr(
        "seqvae.training.fit.fit", lambda settings, callbacks, **parts: handed.append((settings, callbacks, parts))
    )
    arguments = [*words(data_dir, tmp_path, "a"), *more]
    monkeypatch.setattr(sys, "argv", [script.PROG, *arguments])
    script.main()
    ((settings, callbacks, parts),) = handed
    expected = prepare_settings(parse_command_line(schema, arguments, prog="fit", description=""))
    assert settings == expected
    data = make_data(expected)
    trainer_arguments = default_trainer_arguments(expected, data, resolve_devices(expected.compute))
    profilers = [each.pop("profiler") for each in (parts["trainer_arguments"], trainer_arguments)]
    assert all(isinstance(profiler, NoProfiler) for profiler in profilers)
    assert parts["trainer_arguments"] == trainer_arguments
    monitors = make_monitors(expected)
    assert list(map(settings_of, callbacks[: len(monitors)])) == list(map(settings_of, monitors))
    assert list(map(type, callbacks[len(monitors) :])) == list(map(type, make_pictures(data, expected)))
    assert settings_of(parts["data"]) == settings_of(data)


@pytest.mark.parametrize(("script", "schema"), SCRIPTS)
def test_the_table_of_the_recipe_names_the_defaults_of_its_flags(
    script: ModuleType, schema: type[TrainingSettings]
) -> None:
    table = re.findall(r"^#   --(\w+) (\S+)", source_of(script), re.MULTILINE)
    defaults = to_flat_dict(schema())
    assert {name: as_typed(defaults[name]) for name, _ in table} == dict(table)
    changed = {name for name, value in to_flat_dict(TrainingSettings()).items() if defaults[name] != value}
    assert changed <= {name for name, _ in table}


@pytest.mark.parametrize(("script", "schema"), SCRIPTS)
def test_the_comments_on_the_monitor_name_how_closely_it_watches(
    script: ModuleType, schema: type[TrainingSettings]
) -> None:
    comments = re.findall(r"=watch\.(\w+),  # (\w+), or (\w+)", source_of(script))
    assert [name for name, _, _ in comments] == list(Watch._fields)
    for name, plain, fast in comments:
        assert (plain, fast) == (str(getattr(schema.WATCH, name)), str(getattr(schema.FAST_WATCH, name)))


def settings_of(built: object) -> dict[str, Any]:
    """Return what an object was built with, as far as it can be compared."""
    comparable = (bool, int, float, str, type(None))
    return {name: value for name, value in vars(built).items() if isinstance(value, comparable) or is_dataclass(value)}


def source_of(script: ModuleType) -> str:
    assert script.__file__ is not None
    return Path(script.__file__).read_text(encoding="utf-8")


def as_typed(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
