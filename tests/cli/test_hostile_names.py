"""Columns, variables, labels, ids and words are data everywhere: on the terminal, in pictures, in file names, in JSON and CSV."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import train_optimized
from seqvae.errors import run_command
from seqvae.reports.previews import PreviewRow, Track, write_preview_figure
from tests.support.hostile import NAMES
from tests.support.parquet_files import write_splits

SEQUENCES, STEPS = 2 * len(NAMES), 4


def ids(split: int) -> list[str]:
    return [f"{NAMES[number % len(NAMES)]}{split}{number}" for number in range(SEQUENCES)]


def labels() -> list[str]:
    return [NAMES[number % 3] for number in range(SEQUENCES)]


def vectors(split: int) -> dict[str, Any]:
    values = np.random.default_rng(split).normal(size=(SEQUENCES * STEPS, len(NAMES)))
    return {
        "id": np.repeat(ids(split), STEPS),
        "time": np.tile(np.arange(STEPS), SEQUENCES),
        "label": np.repeat(labels(), STEPS),
        **{name: values[:, number] for number, name in enumerate(NAMES)},
    }


def events(split: int) -> dict[str, Any]:
    rows = SEQUENCES * STEPS
    return {
        "id": np.repeat(ids(split), STEPS),
        "time": np.tile(np.arange(STEPS), SEQUENCES),
        "variable": [NAMES[row % len(NAMES)] for row in range(rows)],
        "value": np.random.default_rng(split).normal(size=rows),
        "label": np.repeat(labels(), STEPS),
    }


def text(split: int) -> dict[str, Any]:
    return {
        "id": ids(split),
        "<b>$text$": [" ".join(NAMES[number % 9 :]) for number in range(SEQUENCES)],
        "label": labels(),
    }


KINDS = {"vectors": vectors, "events": events, "tokens": text}


@pytest.mark.parametrize("kind", ["events", "tokens", pytest.param("vectors", marks=pytest.mark.slow)])
def test_a_run_on_hostile_names_shows_them_harmlessly_and_stays_in_its_directory(kind, tmp_path, monkeypatch, capsys):
    write_splits(tmp_path / "data", train=pa.table(KINDS[kind](0)), valid=pa.table(KINDS[kind](1)))
    places = {name: str(tmp_path / name) for name in ("output_dir", "cache_dir")}
    words = [word for name, place in places.items() for word in (f"--{name}", place)]
    words += ["--data_dir", str(tmp_path / "data"), "--label_column", "label", "--run_name", "a"]
    words += ["--width", "16", "--heads", "2", "--depth", "1", "--max_steps", "1", "--log_every_n_steps", "1"]
    words += ["--tokenizer", "characters"] if kind == "tokens" else []
    monkeypatch.setattr(sys, "argv", ["train_optimized.py", *words])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("seqvae.training.callbacks.previews.MOST_COLUMNS", 1)  # pictures take long
    code = run_command(train_optimized.main, "train_optimized.py")
    said = capsys.readouterr()
    assert code == 0, said.err
    assert all(character.isprintable() or character == "\n" for character in said.out + said.err)
    assert "\\x1b[2J" in said.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache_dir", "data", "output_dir"]
    run = tmp_path / "output_dir" / "a"
    written = {path.relative_to(run).as_posix() for path in run.rglob("*")}
    assert all(name.isascii() and name.isprintable() for name in written)
    assert any(name.startswith("samples/step-") for name in written)
    for name in ("events.jsonl", "posterior.jsonl"):
        assert all(json.loads(line)["step"] >= 0 for line in (run / name).read_bytes().splitlines())
    with (run / "metrics.csv").open(newline="") as file:
        assert all(None not in row for row in csv.DictReader(file, strict=True))
    for page in (run / "samples").glob("*.txt"):
        assert all(character.isprintable() or character == "\n" for character in page.read_text(encoding="utf-8"))


def test_each_hostile_name_is_drawn_as_it_is(tmp_path):
    track = Track([0.0, 1.0], [1.0, 2.0])
    rows = [PreviewRow(name, name == NAMES[0], [track], [track], [track]) for name in NAMES[:10]]
    write_preview_figure(tmp_path / "a.png", rows, title="".join(NAMES), time_label=NAMES[0])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(Path(tmp_path).iterdir())) == 1
