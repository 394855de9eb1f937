"""The run that nothing happened to, made once; and a place for each test's own."""

from pathlib import Path

import pytest

from tests.faults.runs import Place, assert_done


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture
def place(tmp_path: Path, shared: Path) -> Place:
    return Place(tmp_path, shared / "cache")


@pytest.fixture(scope="session")
def unbroken(shared: Path) -> Path:
    return assert_done(Place(shared, shared / "cache").train("unbroken")).run
