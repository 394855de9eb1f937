"""The example of molecules: the published split kept, one held out of it by a hash, and what RDKit says of strings."""

import gzip
import hashlib
import sys
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from examples.molecules import chemistry, data, results
from sequences.errors import DataError
from tests.parquet_files import write
from training.exit_codes import UsageError

PUBLISHED = ["C" * length + "O" for length in range(1, 1000)]


def make_wheel(folder: Path, monkeypatch: pytest.MonkeyPatch, heading: str = "SMILES") -> None:
    folder.mkdir()
    path = folder / data.WHEEL.file_name
    with zipfile.ZipFile(path, "w") as archive:
        for name, smiles in zip(data.MEMBERS, (PUBLISHED, ["CCN", "CN"]), strict=True):
            archive.writestr(name, gzip.compress("\n".join([heading, *smiles, ""]).encode()))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(data, "WHEEL", data.WHEEL._replace(sha256=sha256))


def column(path: Path) -> list[str]:
    return pq.read_table(path)["smiles"].to_pylist()


def test_all_published_molecules_come_out_once(tmp_path, monkeypatch):
    make_wheel(tmp_path / "wheels", monkeypatch)
    counts = data.make_parquet(tmp_path / "wheels", tmp_path / "data")
    train, valid, test = (column(tmp_path / "data" / f"{split}.parquet") for split in ("train", "valid", "test"))
    assert counts == {"train": len(train), "valid": len(valid), "test": 2}
    assert sorted(train + valid) == sorted(PUBLISHED)
    assert test == ["CCN", "CN"]
    assert 1 <= len(valid) <= 20


def test_a_limit_changes_no_molecules_side():
    _, valid = data.hold_out(PUBLISHED)
    assert data.hold_out(PUBLISHED[:500])[1] == [smiles for smiles in valid if smiles in PUBLISHED[:500]]


def test_another_heading_is_refused(tmp_path, monkeypatch):
    make_wheel(tmp_path / "wheels", monkeypatch, heading="smiles,split")
    with pytest.raises(DataError, match=r"train\.csv\.gz: the heading is 'smiles,split'"):
        data.make_parquet(tmp_path / "wheels", tmp_path / "data")


def test_samples_are_counted_as_molecules_not_as_strings():
    pytest.importorskip("rdkit", exc_type=ImportError)
    counted = chemistry.quality(["CCO", "OCC", "CCN", "C1CC", "", "c1ccccc1"], trained_on={"CCN"})
    assert counted == (6, 4, 3, 2)
    assert counted.lines()[0] == "valid   4 of 6: 66.7%"


def test_the_picture_has_a_place_for_each_string(tmp_path):
    pytest.importorskip("rdkit", exc_type=ImportError)
    from PIL import Image

    chemistry.draw_molecules(tmp_path / "grid.png", ["CCO", "C1CC", "c1ccccc1"], ["", "", "benzene"], columns=2)
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.size == (2 * chemistry.CELL, 2 * chemistry.CELL)


def test_samples_are_judged_from_what_the_command_writes(tmp_path):
    pytest.importorskip("rdkit", exc_type=ImportError)
    write(tmp_path / "data" / "train.parquet", {"smiles": ["CCO"]})
    samples = write(tmp_path / "samples.parquet", {"smiles": ["CCO", "CCN", "C1CC"], "steps": [3, 3, 4]})
    assert results.judge(samples, tmp_path / "data", tmp_path / "samples.png") == (3, 2, 2, 1)
    results.show_way(samples, tmp_path / "way.png")
    assert (tmp_path / "way.png").exists()


def test_without_rdkit_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rdkit", None)
    with pytest.raises(UsageError, match=r"pip install -c constraints\.txt -e '\.\[examples\]'"):
        chemistry.canonical_of("CCO")
