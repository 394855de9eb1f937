"""What several test files share: the real data sets, and the way from a directory of Parquet to an opened cache."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from seqvae.config.data import CacheSettings, LengthSettings, SourceSettings
from seqvae.data.cache import SequenceData, open_cache, prepare_cache
from seqvae.monitors.drawing import Drawing
from tests.support.parquet_files import Load

REAL_DATA = "SEQVAE_REAL_DATA"

# Tests run side by side and their networks are tiny: threads of one test would only wait for those of another.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the commands that tests start

# A busy machine must not fail a property that holds.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")


START_DRAWING = Drawing.start


@pytest.fixture(scope="session", autouse=True)
def nothing_is_drawn() -> Iterator[None]:
    """Runs of this process draw nothing, nor write reports, those of fixtures included: each is a process and takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drawing, "start", lambda *_, **__: False)
        yield


@pytest.fixture(autouse=True)
def drawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests marked `draws` do."""
    if request.node.get_closest_marker("draws") is not None:
        monkeypatch.setattr(Drawing, "start", START_DRAWING)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of the real data sets, which are not part of the project."""
    folder = os.environ.get(REAL_DATA)
    if not folder:
        pytest.skip(f"{REAL_DATA} does not say where the real data are")
    return Path(folder)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Build the cache of a directory below tmp_path / "cache", and open it."""

    def load_directory(
        data_dir: Path | str,
        *,
        max_sequence_length: int = 1000,
        long_sequences: Any = "truncate",
        window_stride: int | None = None,
        in_memory: bool = False,
        **source: Any,
    ) -> SequenceData:
        lengths = LengthSettings(
            max_sequence_length=max_sequence_length, long_sequences=long_sequences, window_stride=window_stride
        )
        settings = SourceSettings(data_dir=str(data_dir), **source)
        path = prepare_cache(settings, CacheSettings(cache_dir=str(tmp_path / "cache")))
        return open_cache(path, lengths, in_memory)

    return load_directory
