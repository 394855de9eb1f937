"""What generated damage has brought to light: pipes, links to nowhere, names that are not UTF-8 or break a line, one absurd id."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.reliability.bad_input_cases import varint
from seqvae.cli.main import main
from seqvae.errors import DataError, ExitCode
from tests.support.parquet_files import Load, tokens, write, write_splits

NOT_UTF8 = os.fsdecode(b"\xff\xfe")


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """Data with nothing wrong, and room for something else below train/."""
    write(tmp_path / "d/train/a.parquet", {"tokens": [[1], [2]]})
    write(tmp_path / "d/valid.parquet", {"tokens": [[1]]})
    return tmp_path / "d"


@pytest.fixture
def no_patience() -> Iterator[None]:
    """Whoever waits for a pipe is woken by an error."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [os.mkfifo, link_to_device])
@pytest.mark.usefixtures("no_patience")
def test_a_pipe_or_a_device_is_refused_or_left_out_and_nobody_waits_for_it(good, load: Load, make):
    make(good / "train/z.parquet")
    with pytest.raises(
        DataError, match=r"train/z.parquet: is no file but a pipe, a device or the like. Put a Parquet file"
    ):
        load(good)
    data = load(good, on_bad_files="skip")
    assert tokens(data.splits["train"]) == [[1], [2]]
    assert "1 of 3 files left out that cannot be used (--on_bad_files skip)" in data.notes


@pytest.mark.parametrize("place", ["train/{}.parquet", "train/{}/a.parquet"])
def test_a_name_that_is_not_utf8_is_refused_or_left_out(good, load: Load, place):
    path = good / place.format(NOT_UTF8)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes((good / "train/a.parquet").read_bytes())
    with pytest.raises(
        DataError, match=r"cannot be read, as its name is not UTF-8\. Rename it or its folder, or leave"
    ):
        load(good)
    assert tokens(load(good, on_bad_files="skip").splits["train"]) == [[1], [2]]


@pytest.mark.parametrize("target", ["nowhere.parquet", "z.parquet"], ids=["nowhere", "itself"])
def test_the_report_on_a_link_that_leads_nowhere_names_it(good, tmp_path, monkeypatch, capsys, target):
    (good / "train/z.parquet").symlink_to(target)
    words = ["--data_dir", str(good), "--cache_dir", str(tmp_path / "cache")]
    monkeypatch.setattr(sys, "argv", ["seqvae", "inspect", *words])
    assert main() == ExitCode.DATA
    said = " ".join(capsys.readouterr().out.split())
    assert f"{good}/train/z.parquet: is not a readable Parquet file: it is gone" in said
    assert "2 can be used, 1 cannot" in said


def test_a_name_with_a_line_break_begins_no_line_of_its_own(good, tmp_path, monkeypatch, capsys):
    (good / "train/z\nseqvae inspect: all is well.parquet").touch()
    words = ["--check_only", "--data_dir", str(good), "--cache_dir", str(tmp_path / "cache")]
    monkeypatch.setattr(sys, "argv", ["seqvae", "inspect", *words])
    assert main() == ExitCode.DATA
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"seqvae inspect: {good}/train/z\\nseqvae inspect: all is well.parquet: is not a readable")


def with_footer(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Write a file again with another footer."""
    data = path.read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    footer = change(data[-8 - length : -8])
    path.write_bytes(data[: -8 - length] + footer + len(footer).to_bytes(4, "little") + data[-4:])


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("of the file", "its footer is damaged .it declares 0 rows, but 77 in its row groups"),
        ("of the row group", "its footer is damaged .it declares 77 rows, but 0 in its row groups"),
        (
            "of values in a column",
            "row group 0 .at or after row 0. cannot be read, the file is damaged .it ends after 0 of 77",
        ),
    ],
)
def test_rows_that_a_damaged_footer_hides_are_missed(good, load: Load, place, said):
    """77 stands there three times: rows of the file, values of the text, rows of the row group."""
    path = write(good / "train/z.parquet", {"text": ["ab"] * 77})
    for other in (good / "train/a.parquet", good / "valid.parquet"):
        write(other, {"text": ["ab", "ba"]})
    number, none = b"\x16" + varint(77), b"\x16" + varint(0)

    def hide(footer: bytes) -> bytes:
        parts = footer.split(number)
        order = ("of the file", "of values in a column", "of the row group")
        assert len(parts) == 1 + len(order)
        numbers = [none if one == place else number for one in order]
        return b"".join(part + number for part, number in zip(parts, [*numbers, b""], strict=True))

    with_footer(path, hide)
    with pytest.raises(DataError, match=f"train/z.parquet: .*{said}"):
        load(good, tokenizer="characters")
    data = load(good, tokenizer="characters", on_bad_files="skip")
    assert len(data.splits["train"]) == 2
    assert "1 of 3 files left out that cannot be used (--on_bad_files skip)" in data.notes


def test_one_absurd_id_makes_no_vocabulary_of_billions(tmp_path, load: Load):
    directory = write_splits(tmp_path / "d", train={"tokens": [[1], [2, 2**24], [3]]}, valid={"tokens": [[1]]})
    with pytest.raises(
        DataError, match=r"train.parquet: row 1: holds token id 16777216, .* vocabulary of 16,777,217 ids"
    ):
        load(directory)
    assert load(directory, vocabulary_size=2**24 + 1).description.vocabulary_size == 2**24 + 1
    assert tokens(load(directory, vocabulary_size=100, bad_values="drop").splits["train"]) == [[1], [3]]


def test_the_largest_vocabulary_of_ids_is_taken(tmp_path, load: Load):
    directory = write_splits(tmp_path / "d", train={"tokens": [[1], [2, 2**24 - 1]]}, valid={"tokens": [[1]]})
    assert load(directory).description.vocabulary_size == 2**24
