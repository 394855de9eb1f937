"""The benchmark of molecules counts molecules, not strings, and its tokens spell every one."""

import pytest

from benchmarks.quality.molecules import make_tokenizer, molecules_of
from seqvae.errors import DataError
from tests.support.parquet_files import write


def test_samples_are_counted_as_molecules_not_as_strings():
    pytest.importorskip("rdkit", exc_type=ImportError)
    assert molecules_of(["CCO", "OCC", "CCN", "C1CC", "", "c1ccccc1"]) == ["CCO", "CCO", "CCN", "c1ccccc1"]


def test_rings_become_tokens_and_a_molecule_that_they_cannot_spell_is_named(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", exc_type=ImportError)
    rings = [f"C{'C' * (n % 5)}c1ccccc1{'N' * (n % 3)}" for n in range(200)]
    for split, smiles in {"train": [*rings, "[Br]"], "valid": rings[:2], "test": ["BrCc1ccccc1"]}.items():
        write(tmp_path / f"{split}.parquet", {"smiles": smiles})
    make_tokenizer(tmp_path, tmp_path / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert "c1ccccc1" in {token.removeprefix("C") for token in tokenizer.encode("c1ccccc1").tokens}
    write(tmp_path / "test.parquet", {"smiles": ["CS"]})
    with pytest.raises(DataError, match="molecule 'CS' comes back from the tokenizer as 'C'"):
        make_tokenizer(tmp_path, tmp_path / "tokenizer.json")
