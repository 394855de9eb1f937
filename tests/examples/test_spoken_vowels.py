"""The example of spoken vowels: .ts files read exactly, the wheel known before it is opened, the published split kept."""

import hashlib
import os
import zipfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from examples.shared import Wheel, fetch, members, read_latents
from examples.spoken_vowels import data
from examples.spoken_vowels.data import read_ts
from examples.spoken_vowels.results import ends_of, show_speakers, show_way
from seqvae.errors import DataError
from tests.support.parquet_files import write

HEAD = "#Kudo et al.\n@problemName JapaneseVowels\n@timeStamps false\n@missing false\n@classLabel true 1 2\n@data\n"


def utterance(steps: int, first: float, speaker: int) -> str:
    return ":".join(",".join(str(first + d + s / 100) for s in range(steps)) for d in range(12)) + f":{speaker}\n"


def make_wheel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a package with two training and three test utterances, in place of the published one."""
    folder.mkdir()
    path = folder / data.WHEEL.file_name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(data.MEMBERS[0], HEAD + utterance(3, 0.5, 1) + utterance(7, -1.5, 2))
        archive.writestr(data.MEMBERS[1], HEAD + utterance(2, 10, 1) + utterance(4, 20, 2) + utterance(5, 30, 2))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(data, "WHEEL", data.WHEEL._replace(sha256=sha256))


def test_the_published_split_is_kept_and_every_second_test_utterance_validates(tmp_path, monkeypatch):
    make_wheel(tmp_path / "wheels", monkeypatch)
    assert data.make_parquet(tmp_path / "wheels", tmp_path / "data") == {"train": 2, "valid": 1, "test": 2}
    splits = {split: pq.read_table(tmp_path / "data" / f"{split}.parquet") for split in ("train", "valid", "test")}
    assert {split: table["id"].to_pylist() for split, table in splits.items()} == {
        "train": [0, 1],
        "valid": [2],
        "test": [3, 4],
    }
    assert splits["test"]["label"].to_pylist() == [1, 2]
    frames = np.array(splits["test"]["frames"][1].as_py())
    assert frames.shape == (5, 12)
    np.testing.assert_allclose(frames[4], 30 + np.arange(12) + 0.04, rtol=1e-6)


def test_what_was_made_is_detected_as_vectors(tmp_path, monkeypatch, load):
    make_wheel(tmp_path / "wheels", monkeypatch)
    data.make_parquet(tmp_path / "wheels", tmp_path / "data")
    opened = load(tmp_path / "data", label_column="label")
    assert opened.description.kind == "vectors"
    assert opened.description.classes


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1,2:3,4:9", "no line @data"),
        ("@missing true\n@data\n1,?:3,4:9", "@missing true"),
        ("@data\n1,2:3,4:9\n1,2:3:9", r"line 3: dimensions of \[1, 2\] steps"),
        ("@data\n1,x:3,4:9", "line 2: could not convert"),
    ],
)
def test_what_is_no_such_file_is_refused_with_its_line(text, complaint):
    with pytest.raises(DataError, match=complaint):
        read_ts(text, "a.ts")


def test_a_wheel_that_is_not_the_published_one_is_not_opened(tmp_path):
    wheel = Wheel("package", "1.0", "0" * 64)
    (tmp_path / wheel.file_name).write_bytes(b"something else")
    with pytest.raises(DataError, match="remove the file"):
        fetch(wheel, tmp_path)


def test_without_a_network_it_says_what_to_do(tmp_path, monkeypatch):
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        DataError, match=r"Without a network: run `python -m pip download --no-deps no-such-package==1.0`"
    ):
        fetch(Wheel("no-such-package", "1.0", "0" * 64), tmp_path)


def test_a_file_that_is_not_in_the_wheel_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("a.txt", "a")
    with pytest.raises(DataError, match=r"b\.txt should be in there"):
        members(tmp_path / "a.whl", ["a.txt", "b.txt"])


def test_latents_and_a_way_between_speakers_are_drawn_from_what_the_commands_write(tmp_path, monkeypatch):
    make_wheel(tmp_path / "wheels", monkeypatch)
    data.make_parquet(tmp_path / "wheels", tmp_path / "data")
    ends = ends_of(tmp_path / "data")
    assert ends == (3, 4)
    encoded = {"id": [4, 2, 0], "split": ["test", "valid", "train"], "mean": [[0.0, 1.0], [1.0, 0.5], [9.0, 9.0]]}
    latents = write(tmp_path / "latents.parquet", encoded | {"nll": [1.0, 2.0, 3.0], "rate": [0.5, 0.5, 0.5]})
    show_speakers(latents, tmp_path / "data", tmp_path / "speakers.png")
    frames = {f"frames[{d}]": [0.5, 0.6, 0.7 + d] for d in range(12)}
    way = write(tmp_path / "way.parquet", {"place": [0, 0, 1], "share": [0.0, 0.0, 1.0], "step": [0, 1, 0]} | frames)
    show_way(way, tmp_path / "data", ends, tmp_path / "way.png")
    assert min((tmp_path / name).stat().st_size for name in ("speakers.png", "way.png")) > 5_000


def test_only_the_requested_splits_of_latents_are_read(tmp_path):
    encoded = {"id": [4, 2], "split": ["test", "train"], "mean": [[0.0, 1.0], [1.0, 0.5]]}
    path = write(tmp_path / "latents.parquet", encoded | {"nll": [1.0, 2.0], "rate": [0.5, 0.25]})
    latents = read_latents(path, ["train"])
    assert (latents.ids, latents.mean_NZ.tolist(), latents.surprise_N.tolist()) == ([2], [[1.0, 0.5]], [2.25])


def test_data_that_are_there_already_keep_their_date(tmp_path, monkeypatch):
    """Otherwise their cache would be built again."""
    make_wheel(tmp_path / "wheels", monkeypatch)
    path = tmp_path / "data" / "train.parquet"
    data.make_parquet(tmp_path / "wheels", tmp_path / "data")
    os.utime(path, (1, 1))
    data.make_parquet(tmp_path / "wheels", tmp_path / "data")
    assert path.stat().st_mtime == 1
    write(path, {"id": [0]})
    data.make_parquet(tmp_path / "wheels", tmp_path / "data")
    assert pq.read_table(path).num_rows == 2
