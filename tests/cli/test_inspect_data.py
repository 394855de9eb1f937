"""`seqvae inspect`: what it says of each kind of data, whether they would train, and every file that stands in the way."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib.image
import numpy as np
import pyarrow as pa
import pytest

from seqvae.cli.command_line import parse_command_line
from seqvae.cli.inspect_data import InspectSettings, ReportSettings
from seqvae.cli.main import main
from seqvae.config.training import OptimizedSettings
from seqvae.data.demo import ILLNESSES, write_demo
from seqvae.errors import ExitCode
from tests.support.parquet_files import flip_bit, write, write_splits

ROOT = Path(__file__).parent.parent.parent
HOSTILE = "$x_{1}$ \x1b[2J\x9b31m\u202e\n"


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def flat(self) -> str:
        """What stands on stdout, however the lines are broken."""
        return " ".join(self.out.split())


Inspect = Callable[..., Said]


@pytest.fixture
def inspect(tmp_path, monkeypatch, capsys) -> Inspect:
    """The command, run in this process and in tmp_path."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Said:
        line = ["seqvae", "inspect", *map(str, words), "--cache_dir", str(tmp_path / "cache")]
        monkeypatch.setattr(sys, "argv", line)
        return Said(main(), *capsys.readouterr())

    return run


@pytest.fixture
def token_lists(tmp_path) -> Path:
    return write_splits(
        tmp_path / "lists",
        train={"tokens": [[number % 7] * (1 + number % 5) for number in range(200)]},
        valid={"tokens": [[3, 4], [5]]},
    )


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("tokens", ["one sequence a row in column 'tokens', id 'id'", "Tokens: 32", "--label_column label"]),
        ("vectors", ["long table, id 'id'", "Features: 3", "missing"]),
        ("events", ["long table, id 'ts_id'", "Variables: ", "in sequences", "A sequence spans"]),
    ],
)
def test_each_kind_is_described_down_to_its_names_and_drawn(inspect, tmp_path, kind, wanted):
    folder = write_demo(tmp_path / "demo", kind, sequences=150, mean_length=20)
    said = inspect("--data_dir", folder, "--plot_path", "figure.png")
    assert said.code == ExitCode.DONE
    for text in (
        "READY to train",
        "Columns",
        "Splits",
        "Lengths",
        "Batches",
        "as chosen",
        "random 64",
        "random 4",
        *wanted,
    ):
        assert text in said.out
    assert (
        max(map(len, said.out.splitlines()[7:])) <= 80
    )  # above stands the command, which is to be copied in one piece
    pixels = matplotlib.image.imread(tmp_path / "figure.png")
    assert pixels.shape[:2] == (1020, 1440)
    darkness = 1 - pixels[..., :3].mean(axis=2)
    assert all((quarter > 0.1).mean() > 0.02 for half in np.split(darkness, 2) for quarter in np.split(half, 2, axis=1))


def test_labels_are_counted_where_they_are_given(inspect, tmp_path):
    folder = write_demo(tmp_path / "demo", "events", sequences=100, mean_length=10)
    said = inspect("--data_dir", folder, "--label_column", "label")
    _, *rows = said.out.partition("\nLabels\n")[2].partition("\n\n")[0].splitlines()
    cells = [re.split(" {2,}", row.strip()) for row in rows]
    assert [name for name, *_ in cells] == list(ILLNESSES)
    assert [sum(int(row[column]) for row in cells) for column in (1, 2, 3)] == [100, 10, 10]


def test_the_command_that_is_advised_trains_on_what_was_inspected(inspect, tmp_path, token_lists):
    words = ["--max_sequence_length", "3", "--no_bucketing", "--batch_size", "4", "--vocabulary_size", "9"]
    words += ["--gradient_accumulation_steps", "3"]
    said = inspect("--data_dir", token_lists, *words)
    command = next(line for line in said.out.splitlines() if "seqvae train" in line)
    advised = parse_command_line(OptimizedSettings, shlex.split(command)[2:], prog="x", description="")
    inspected = parse_command_line(
        InspectSettings,
        ["--data_dir", str(token_lists), *words, "--cache_dir", str(tmp_path / "cache")],
        prog="x",
        description="",
    )
    for group in ("source", "lengths", "cache", "batches"):
        assert getattr(advised, group) == getattr(inspected, group)
    assert advised.optimizer.gradient_accumulation_steps == 3


def test_the_risk_of_a_collapse_is_that_of_the_flags_and_says_which_are_defaults(inspect, token_lists):
    said = inspect("--data_dir", token_lists)
    assert "risk of collapse " in said.flat
    assert "autoregressive decoder, weight 1 after 20.0 % of the run, a floor of 1.6 nats per sequence" in said.flat
    assert "defaults among them: --decoder transformer, --latent_size 16, " in said.flat
    words = ["--data_dir", token_lists, "--free_bits", "0"]
    mild, risky = inspect(*words).flat, inspect(*words, "--beta", "8").flat
    assert "weight 8 after 20.0 % of the run, no floor under the rate" in risky
    assert "--beta 8" in risky.partition("risk of collapse")[0]

    def figure(flat: str) -> float:
        return float(flat.partition("risk of collapse ")[2].split()[0])

    assert figure(risky) > figure(mild)


def test_batches_are_accumulated_as_the_advised_command_does_it():
    assert ReportSettings().gradient_accumulation_steps == OptimizedSettings().optimizer.gradient_accumulation_steps


def test_what_a_grid_of_shapes_costs_stands_beside_the_batches_without(inspect, token_lists):
    assert "--pad_grid 0" not in inspect("--data_dir", token_lists, "--pad_grid", "0").flat.partition("seqvae train")[0]
    flat = inspect("--data_dir", token_lists, "--pad_grid", "1").flat
    assert "--pad_grid 0" in flat


def test_a_script_gets_exit_code_0_and_one_line_of_good_data(tmp_path, token_lists):
    done = check_in_a_process(token_lists, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "ready to train: tokens, 200 train, 2 valid sequences\n"


def test_a_script_gets_exit_code_3_and_one_line_of_bad_data(tmp_path, token_lists):
    (token_lists / "valid.parquet").write_bytes(b"")
    done = check_in_a_process(token_lists, tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"seqvae inspect: {token_lists / 'valid.parquet'}: ")
    assert len(done.stderr.splitlines()) == 1


def check_in_a_process(data_dir: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    words = ["--data_dir", str(data_dir), "--cache_dir", str(tmp_path / "cache"), "--check_only"]
    return subprocess.run(
        [sys.executable, "-m", "seqvae", "inspect", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def broken(tmp_path) -> Path:
    """Three files that hold sequences, and one of each that does not."""
    folder = tmp_path / "broken"
    rows = {"id": np.arange(50), "tokens": [[1, 2, 3]] * 50}
    for number in range(3):
        write(folder / "train" / f"good{number}.parquet", rows | {"id": np.arange(50) + 100 * number})
    write(folder / "valid" / "good.parquet", rows | {"id": np.arange(50) + 1000})
    write(folder / "train" / "without_tokens.parquet", {"id": [7]})
    write(folder / "train" / "of_text.parquet", {"id": [8], "tokens": [["a"]]})
    (folder / "train" / "empty.parquet").write_bytes(b"")
    (folder / "train" / "page.parquet").write_text("<!DOCTYPE html><html></html>")
    whole = (folder / "train" / "good0.parquet").read_bytes()
    (folder / "train" / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    flipped = write(folder / "train" / "flipped.parquet", rows, write_page_checksum=True, compression="none")
    flip_bit(flipped, 60)
    return folder


BAD_FILES = ("without_tokens", "of_text", "empty", "page", "cut", "flipped")


def test_every_bad_file_is_listed_not_only_the_first(inspect, broken):
    said = inspect("--data_dir", broken)
    assert said.code == ExitCode.DATA
    assert "NOT READY to train" in said.out
    listed = [line.split(":")[0] for line in said.out.splitlines() if line.startswith("  x ")]
    assert sorted(listed) == sorted(f"  x {broken / 'train' / name}.parquet" for name in BAD_FILES)
    assert "4 can be used, 6 cannot" in said.flat


def test_damage_that_only_reading_finds_is_listed_file_by_file(inspect, tmp_path):
    for name in ("train/one", "train/two", "train/good", "valid/three"):
        path = write(
            tmp_path / f"data/{name}.parquet", {"tokens": [[1, 2]] * 9}, write_page_checksum=True, compression="none"
        )
        if "good" not in name:
            flip_bit(path, 60)
    said = inspect("--data_dir", tmp_path / "data")
    assert said.code == ExitCode.DATA
    assert sum(line.startswith("  x ") for line in said.out.splitlines()) == 3


def test_bad_files_that_are_left_out_are_listed_too(inspect, broken):
    said = inspect("--data_dir", broken, "--on_bad_files", "skip")
    assert said.code == ExitCode.DONE
    assert "READY to train" in said.out
    assert sum(line.startswith("  x ") for line in said.out.splitlines()) == 6


@pytest.mark.parametrize(
    ("columns", "found", "column"),
    [
        ({"values": [[1.0, float("nan")]]}, "nan", "values  list<element: double>  sequence"),
        ({"colour": ["red"], "number": [1]}, "--tokenizer", "colour  string"),
    ],
)
def test_what_stands_in_the_way_is_said_beside_the_columns_there_are(inspect, tmp_path, columns, found, column):
    write_splits(tmp_path / "data", train=columns, valid=columns)
    said = inspect("--data_dir", tmp_path / "data")
    assert said.code == ExitCode.DATA
    assert found in said.flat
    assert column in said.out
    assert not list(tmp_path.glob("*.png"))


def test_a_directory_that_is_not_there_is_all_that_is_said(inspect, tmp_path):
    said = inspect("--data_dir", tmp_path / "nowhere")
    assert said.code == ExitCode.DATA
    assert "does not exist" in said.flat
    assert "Columns" not in said.out


def test_flags_that_do_not_go_with_the_data_are_an_error_of_usage(inspect, token_lists):
    said = inspect("--data_dir", token_lists, "--tokens_per_batch", "3")
    assert said.code == ExitCode.USAGE
    assert "--tokens_per_batch 3 is less than the longest sequence (5 steps)" in said.err


def test_embeddings_that_lack_a_variable_stand_in_the_way(inspect, tmp_path):
    folder = write_demo(tmp_path / "demo", "events", sequences=20, mean_length=10)
    (tmp_path / "embeddings.csv").write_text("variable,e0\npulse,1.0\n")
    said = inspect("--data_dir", folder, "--variable_embeddings_path", tmp_path / "embeddings.csv", "--check_only")
    assert said.code == ExitCode.DATA
    assert "--variable_embeddings_path" in said.err


def test_no_figure_is_drawn_unless_its_path_is_given(inspect, tmp_path, token_lists):
    before = sorted(tmp_path.iterdir())
    assert "\nfigure: " not in inspect("--data_dir", token_lists).out
    assert sorted({*before, tmp_path / "cache"}) == sorted(tmp_path.iterdir())
    said = inspect("--data_dir", token_lists, "--plot_path", "lists.png")
    assert said.out.endswith("\nfigure: lists.png\n")
    assert (tmp_path / "lists.png").stat().st_size > 10_000


def test_unused_columns_that_may_be_labels_or_groups_are_named(inspect, tmp_path):
    rows = {
        "steps taken": [[0.5, number / 7] for number in range(400)],
        "who": [f"p{number % 25:02d}" for number in range(400)],
        "what it is": pa.array([("sit", "run", None)[number % 3] for number in range(400)]).dictionary_encode(),
        "passed": [number % 5 == 0 for number in range(400)],
        "comment": [f"c{number // 2}" for number in range(400)],
        "version": [1] * 400,
    }
    write(tmp_path / "d" / "rows.parquet", rows)
    flat = inspect("--data_dir", tmp_path / "d").flat
    assert "'what it is': 2 values, perhaps a label: --label_column 'what it is'" in flat
    assert "'passed': 2 values, perhaps a label: --label_column passed" in flat
    assert "'who': 25 values, perhaps a group: --id_column who keeps all of a value on one side of a split" in flat
    assert flat.count("perhaps") == 3
    labelled = inspect("--data_dir", tmp_path / "d", "--label_column", "passed", "--id_column", "who").flat
    assert "perhaps" not in labelled


def test_in_a_long_table_a_label_is_the_same_in_all_rows_of_a_sequence(inspect, tmp_path):
    number = np.repeat(np.arange(60), 4)
    rows = {"id": number, "time": np.tile(np.arange(4), 60), "x": number / 3, "y": number / 4}
    rows |= {"site": np.array(["n", "s"])[number % 2], "state": np.tile(["on", "off"], 120)}
    write(tmp_path / "d" / "rows.parquet", rows)
    flat = inspect("--data_dir", tmp_path / "d").flat
    assert "'site': 2 values, perhaps a label: --label_column site" in flat
    assert flat.count("perhaps") == 1


@pytest.mark.parametrize("kind", ["tokens", "vectors"])
def test_copies_of_sequences_are_counted(inspect, tmp_path, kind):
    scale = 1 if kind == "tokens" else 0.5
    rows = [[scale * (number % 90), 2 * scale][: 1 + number % 2] for number in range(400)]
    write_splits(tmp_path / "d", train={"s": rows}, valid={"s": rows[:9]})
    flat = inspect("--data_dir", tmp_path / "d").flat
    assert "310 of the first 400 training sequences are exact copies of others" in flat
    unique = {"s": [[scale * number, 1.0 * number][: 1 + number % 2] for number in range(400)]}
    if kind == "vectors":
        write_splits(tmp_path / "e", train=unique, valid={"s": rows[:9]})
        assert "exact copies" not in inspect("--data_dir", tmp_path / "e").flat


def test_a_figure_that_cannot_be_written_is_an_error_of_storage(inspect, token_lists):
    said = inspect("--data_dir", token_lists, "--plot_path", "nowhere/figure.png")
    assert said.code == ExitCode.STORAGE
    assert "READY to train" in said.out
    assert "--plot_path" in said.err


@pytest.mark.parametrize("kind", ["vectors", "events", "tokens"])
def test_names_in_the_data_steer_neither_the_terminal_nor_the_figure(inspect, tmp_path, kind):
    steps = np.tile(np.arange(4), 6)
    columns = {
        "vectors": {
            "id": np.repeat(np.arange(6), 4),
            "time": steps,
            HOSTILE: pa.array(np.random.default_rng(0).normal(size=24)),
        },
        "events": {
            "id": np.repeat(np.arange(6), 4),
            "time": steps,
            "variable": [HOSTILE] * 24,
            "value": np.arange(24.0),
        },
        "tokens": {"id": np.arange(6), HOSTILE: [HOSTILE] * 6},
    }[kind]
    later = columns | {"id": np.asarray(columns["id"]) + 100}
    write_splits(tmp_path / "data", train=columns, valid=later)
    words = ["--tokenizer", "characters"] if kind == "tokens" else []
    said = inspect("--data_dir", tmp_path / "data", "--plot_path", "data_report.png", *words)
    assert said.code == ExitCode.DONE
    assert all(character.isprintable() or character == "\n" for character in said.out)
    assert "\\x1b" in said.out
    assert (tmp_path / "data_report.png").exists()


def test_real_data_are_ready(inspect, real_data):
    said = inspect("--data_dir", real_data / "physionet2012")
    assert said.code == ExitCode.DONE
    assert "1,399,793" in said.out
    assert "constant in the training split, left unscaled: MechVent" in said.flat
