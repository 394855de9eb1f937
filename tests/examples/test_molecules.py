"""The example of molecules: the published split kept, one held out of it by a hash, and what RDKit says of strings."""

import gzip
import hashlib
import json
import sys
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from examples.molecules import data, results
from seqvae.errors import DataError, UsageError
from tests.support.parquet_files import write

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
    ids = [one for split in counts for one in pq.read_table(tmp_path / "data" / f"{split}.parquet")["id"].to_pylist()]
    assert ids == list(range(len(PUBLISHED) + 2))
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
    counted = results.quality(["CCO", "OCC", "CCN", "C1CC", "", "c1ccccc1"], trained_on={"CCN"})
    assert counted == (6, 4, 3, 2)
    assert counted.lines()[0] == "valid   4 of 6: 66.7%"


def test_the_picture_has_a_place_for_each_string(tmp_path):
    pytest.importorskip("rdkit", exc_type=ImportError)
    from PIL import Image

    results.draw_molecules(tmp_path / "grid.png", ["CCO", "C1CC", "c1ccccc1"], ["", "", "benzene"], columns=2)
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.size == (2 * results.CELL, 2 * results.CELL)


def test_samples_and_a_way_are_judged_and_drawn_from_what_the_commands_write(tmp_path):
    pytest.importorskip("rdkit", exc_type=ImportError)
    write(tmp_path / "data" / "train.parquet", {"id": [0], "smiles": ["CCO"]})
    write(tmp_path / "data" / "test.parquet", {"id": [7, 8, 9], "smiles": ["CCO", "CCN", "C"]})
    samples = write(tmp_path / "samples.parquet", {"id": [0, 1, 2], "text": ["CCO", "CCN", "C1CC"]})
    assert results.judge(samples, tmp_path / "data", tmp_path / "samples.png") == (3, 2, 2, 1)
    ends = results.ends_of(tmp_path / "data")
    assert ends == (7, 8)
    way = write(tmp_path / "way.parquet", {"place": [0, 1], "share": [0.0, 1.0], "text": ["CCO", "CCN"]})
    results.show_way(way, tmp_path / "data", ends, tmp_path / "way.png")
    assert (tmp_path / "way.png").exists()


def test_validity_is_reported_beside_what_the_latent_carries(tmp_path):
    reading = {"posteriors": 64, "kl_per_dim": [3.5], "active_units": 1, "mutual_information_cap": 4.2}
    rest = {"effective_dimensions": 1.0, "kl_weight": 1.0, "nll": 20.0, "verdict": "healthy", "epoch": 0}
    rows = [
        reading | rest | {"step": step, "rate": rate, "mutual_information": 3.25, "aggregate_kl": rate - 3.25}
        for step, rate in ((100, 4.0), (1200, 3.5))
    ]
    (tmp_path / "posterior.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert results.latent_line(tmp_path) == "latent  rate 3.50, mutual information 3.25 nats at step 1,200"
    (tmp_path / "posterior.jsonl").write_text("")
    with pytest.raises(UsageError, match="holds no reading"):
        results.latent_line(tmp_path)


def test_rings_become_tokens_and_every_molecule_comes_back(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", exc_type=ImportError)
    rings = [f"C{'C' * (n % 5)}c1ccccc1{'N' * (n % 3)}" for n in range(200)]
    for split, smiles in {"train": [*rings, "[Br]"], "valid": rings[:2], "test": ["BrCc1ccccc1"]}.items():
        write(tmp_path / f"{split}.parquet", {"smiles": smiles})
    mean = data.make_tokenizer(tmp_path, tmp_path / "tokenizer.json")
    assert 1 <= mean < 3
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert "c1ccccc1" in {token.removeprefix("C") for token in tokenizer.encode("c1ccccc1").tokens}
    content = (tmp_path / "tokenizer.json").read_bytes()
    data.make_tokenizer(tmp_path, tmp_path / "tokenizer.json")
    assert (tmp_path / "tokenizer.json").read_bytes() == content


def test_a_molecule_that_the_tokens_cannot_spell_is_named(tmp_path):
    pytest.importorskip("tokenizers", exc_type=ImportError)
    for split, smiles in {"train": ["CCO"], "valid": ["CO"], "test": ["CCN"]}.items():
        write(tmp_path / f"{split}.parquet", {"smiles": smiles})
    with pytest.raises(DataError, match=r"molecule 'CCN' comes back from the tokenizer as 'CC'"):
        data.make_tokenizer(tmp_path, tmp_path / "tokenizer.json")


def test_without_rdkit_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rdkit", None)
    with pytest.raises(UsageError, match=r"pip install -c constraints\.txt -e '\.\[examples\]'"):
        results.canonical_of("CCO")
