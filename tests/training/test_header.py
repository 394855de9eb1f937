"""What a run says before it begins: one word for each thing, lines that fit, and no reproach for what a preset chose."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch import nn

from seqvae.cli.command_line import parse_command_line
from seqvae.config.data import CacheSettings, LengthSettings, SourceSettings
from seqvae.config.flags import PRESETS_DIR, set_by_presets
from seqvae.config.training import ObjectiveSettings, OptimizedSettings, TrainingSettings
from seqvae.data.datamodule import SequenceDataModule
from seqvae.text import folded
from seqvae.training.distributed import resolve_devices, resolve_precision
from seqvae.training.fit import make_data, make_monitors
from seqvae.training.network import build_network
from seqvae.training.run_directory.records import header_lines, summary_of
from seqvae.training.schedules import plan_run
from tests.support.parquet_files import write
from tests.support.trained_models import TINY, TOKENIZER, write_data


def settings_for(directory: Path, kind: str) -> TrainingSettings:
    return OptimizedSettings(
        source=SourceSettings(data_dir=str(write_data(directory / "data", kind, {})), tokenizer=TOKENIZER[kind]),
        lengths=LengthSettings(max_sequence_length=5),
        cache=CacheSettings(cache_dir=str(directory / "cache")),
        model=TINY,
    )


def header_of(
    settings: TrainingSettings, data: SequenceDataModule, network: nn.Module | None = None
) -> list[tuple[str, str]]:
    devices = resolve_devices(settings.compute)
    network = network or build_network(data, settings.model, settings.compute, devices.world)
    precision = resolve_precision(settings.compute.precision, devices.accelerator)
    return header_lines(
        settings, data, network, plan_run(settings, data, 1), devices, precision, make_monitors(settings)
    )


@pytest.mark.parametrize(("kind", "unit"), [("tokens", "tokens"), ("vectors", "time steps"), ("events", "time steps")])
def test_a_position_has_one_name_and_a_step_without_one_is_an_optimizer_step(tmp_path, kind, unit):
    settings = settings_for(tmp_path, kind)
    header = dict(header_of(settings, make_data(settings)))
    text = "\n".join(summary_of(settings, make_data(settings)))
    counted = re.findall(r"[\d.,]+ ((?:\w+ )?(?:steps?|tokens?))\b", f"{text}\n{header['training']}")
    assert set(counted) == {unit, "optimizer steps"}
    assert f"of 40 sequences longer than 5 {unit}:" in text


def test_the_header_fits_a_terminal_of_80_columns_without_breaking_a_number(tmp_path):
    settings = settings_for(tmp_path, "events")
    for name, text in header_of(settings, make_data(settings)):
        line = f"{name:<11} {text}"
        lines = folded(line, 80, indent=12).split("\n")
        assert max(map(len, lines)) <= 80
        assert " ".join(one.strip() for one in lines) == line.strip()


def test_the_objective_says_whether_labels_train(tmp_path):
    settings = settings_for(tmp_path, "tokens")
    for path in (tmp_path / "data").iterdir():
        table = pq.read_table(path)
        write(path, table.append_column("failed", pa.array(np.arange(len(table)) % 2)))
    labelled = replace(settings, source=replace(settings.source, label_column="failed"))
    trained = replace(labelled, objective=ObjectiveSettings(label_weight=0.5))
    objectives = [dict(header_of(one, make_data(one)))["objective"] for one in (settings, labelled, trained)]
    assert "'failed'" not in objectives[0]
    assert objectives[1] == f"{objectives[0]}; 'failed' trains nothing (--label_weight)"
    assert objectives[2].startswith("negative ELBO + 0.5 x classification of 'failed' (--label_weight); KL weight ")


def test_the_risk_of_a_collapse_stands_with_the_settings_that_it_follows_from(tmp_path):
    settings = settings_for(tmp_path, "tokens")
    plain = ObjectiveSettings(free_bits=0, kl_schedule="constant", beta=4)
    line = dict(header_of(replace(settings, objective=plain), make_data(settings)))["risk"]
    found = re.fullmatch(
        r"of collapse (0\.\d\d) with these settings \(autoregressive decoder, weight 4, no floor under the rate\): see .*",
        line,
    )
    assert found is not None
    assert float(found[1]) > 0.5
    mild = dict(header_of(settings, make_data(settings)))["risk"]
    assert "weight 1 after 20.0 % of the run, a floor of 0.3 nats per sequence" in mild


def test_of_a_parallel_decoder_of_vectors_the_eigenvalue_is_named(tmp_path):
    settings = settings_for(tmp_path, "vectors")
    settings = replace(settings, model=replace(TINY, decoder="parallel"))
    line = dict(header_of(settings, make_data(settings)))["risk"]
    assert "parallel decoder, largest eigenvalue of the data " in line


def test_a_network_that_is_not_ours_has_no_risk(tmp_path):
    settings = settings_for(tmp_path, "tokens")
    assert "risk" not in dict(header_of(settings, make_data(settings), nn.Linear(1, 1)))


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS_DIR.glob("*.yaml")))
def test_a_preset_gets_no_hints_at_what_it_decided(tmp_path, preset, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    data_dir = str(write_data(tmp_path / "data", "vectors", {}))
    words = ["--data_dir", data_dir, "--cache_dir", str(tmp_path / "cache")]

    def hints(*more: str) -> list[str]:
        settings = parse_command_line(OptimizedSettings, [*words, *more], prog="x", description="")
        return [line for line in summary_of(settings, make_data(settings)) if line.startswith("hint: ")]

    assert hints("--preset", preset) == []
    assert len(hints("--batch_size", "2", "--num_workers", "4")) == 2


def test_a_run_that_resumes_from_its_config_still_follows_its_preset():
    settings = parse_command_line(OptimizedSettings, ["--preset", "memory_limited"], prog="x", description="")
    assert {"batch_size", "num_workers"} <= set_by_presets(settings)
    assert set_by_presets(OptimizedSettings()) == set()
