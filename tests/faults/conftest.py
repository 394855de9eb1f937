"""The run that nothing happened to, made once; and a place for each test's own."""

from pathlib import Path

import pytest

from tests.faults.runs import Place, assert_done, make_data


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("faults")
    make_data(directory / "data")
    return directory


@pytest.fixture
def place(tmp_path: Path, shared: Path) -> Place:
    return Place(tmp_path, shared / "data")


@pytest.fixture(scope="session")
def unbroken(shared: Path) -> Path:
    return assert_done(Place(shared, shared / "data").train("unbroken")).run
