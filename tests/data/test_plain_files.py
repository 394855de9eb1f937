"""A CSV, a TSV, lines of text and JSON lines are read as they are: the sequences that a Parquet file of them would give."""

import json
import os
import sys
from pathlib import Path

import pytest

from seqvae.cli.main import main
from seqvae.data.parquet import plain_files
from seqvae.data.stored_caches import clear_caches
from seqvae.errors import DataError, ExitCode
from tests.support.parquet_files import Load, by_id, events, ids, tokens

HEAD = ("Asset No.", "Logged At", "sensor name", "Reading (raw)")
ROWS = [
    (f"P-{pump}", f"2025-03-01 0{hour}:00:00", sensor, hour + (sensor == "rpm") * 1500)
    for hour in range(3)
    for pump in range(20)
    for sensor in ("rpm", "heat")
]
STEPS = [(60.0 if hour else 0.0, [("heat", float(hour)), ("rpm", 1500.0 + hour)]) for hour in range(3)]


def write_table(path: Path, mark: str) -> Path:
    path.write_text("\n".join(mark.join(map(str, row)) for row in [HEAD, *ROWS]), encoding="utf-8")
    return path


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("b.csv", ";"), ("c.TSV", "\t"), ("größe 1.csv", ",")])
def test_a_table_with_its_times_is_read_as_it_is(tmp_path: Path, load: Load, name, mark):
    data = load(write_table(tmp_path / name, mark))
    assert data.layout.startswith("events: long table, id 'Asset No.', time 'Logged At', variable 'sensor name'")
    for split in data.splits.values():
        assert all(found == STEPS for found in by_id(split, events(split, data.description)).values())
    assert data.description.time_unit == "minutes"


def test_json_lines_hold_lists(tmp_path: Path, load: Load):
    rows = [{"name": f"s{number}", "tokens": [number % 5, 1]} for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = load(tmp_path / "a.jsonl")
    assert data.layout == "tokens: one sequence a row in column 'tokens', id 'name'"


def test_each_line_is_a_text_and_its_number_the_id(tmp_path: Path, load: Load):
    lines = [f"line, with a {number}" if number % 7 else "" for number in range(60)]
    (tmp_path / "lines.txt").write_text("\r\n".join(lines))
    data = load(tmp_path / "lines.txt", tokenizer="words")
    names = data.description.symbols
    for split in data.splits.values():
        for number, line in zip(ids(split), tokens(split), strict=True):
            assert int(number) % 7
            assert [names[token] for token in line[:3]] == ["line,", "with", "a"]
    assert sorted(one for split in data.splits.values() for one in ids(split)) == [n for n in range(60) if n % 7]


def test_an_index_without_a_name_is_no_feature(tmp_path: Path, load: Load):
    rows = [f"{n},{n // 4},{n % 4},{n / 3}" for n in range(80)]
    (tmp_path / "a.csv").write_text("\n".join([",id,time,x", *rows]))
    assert "1 feature ('x')" in load(tmp_path / "a.csv").layout


def test_a_file_is_read_once_for_each_state_of_it(tmp_path: Path, load: Load, monkeypatch):
    path = write_table(tmp_path / "a.csv", ",")
    before = load(path).path
    with monkeypatch.context() as patch:
        patch.setattr(plain_files, "_read", None)
        assert load(path).path == before
    [copy] = (tmp_path / "cache" / plain_files.FOLDER).rglob("*.parquet")
    copy.unlink()
    assert load(path).path == before
    os.utime(path, ns=(1, 1))
    assert load(path).path != before


def test_copies_go_with_the_caches(tmp_path: Path, load: Load):
    load(write_table(tmp_path / "a.csv", ","))
    clear_caches(tmp_path / "cache")
    assert not (tmp_path / "cache" / plain_files.FOLDER).exists()
    assert load(tmp_path / "a.csv").description.kind == "events"


def test_what_cannot_be_read_is_refused_with_its_place(tmp_path: Path, load: Load):
    (tmp_path / "a.csv").write_text("id,x\n1,2\n3\n")
    with pytest.raises(DataError, match=r"a.csv: cannot be read as CSV \(.*Row #3"):
        load(tmp_path / "a.csv")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match=r"b.txt: cannot be read as TXT"):
        load(tmp_path / "b.txt")
    (tmp_path / "c.txt").write_text("\n \n")
    with pytest.raises(DataError, match=r"c\.txt: holds no rows"):
        load(tmp_path / "c.txt")


def test_a_folder_without_parquet_names_the_plain_file_in_it(tmp_path: Path, load: Load):
    (tmp_path / "my data").mkdir()
    path = write_table(tmp_path / "my data" / "a.csv", ",")
    with pytest.raises(DataError, match=f"--data_dir '{path}'"):
        load(tmp_path / "my data")


def test_inspect_shows_the_columns_of_a_plain_file_whose_times_are_text(tmp_path: Path, monkeypatch, capsys):
    path = tmp_path / "a.csv"
    path.write_text(write_table(path, ",").read_text().replace("2025-03-01", "01/03/2025"))
    monkeypatch.setattr(
        sys, "argv", ["seqvae", "inspect", "--data_dir", str(path), "--cache_dir", str(tmp_path / "cache")]
    )
    assert main() == ExitCode.DATA
    said = " ".join(capsys.readouterr().out.split())
    assert "'Logged At' is text: convert it to time stamps or numbers (pandas.to_datetime)" in said
    assert "--sequence_column" not in said
    assert "Logged At string" in said
