"""Sizes of memory as people type them, what is left of a machine's, and the search for the largest size that fits into it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqvae.profiling.memory import available_memory
from seqvae.profiling.size_search import RESOLUTION, largest_that_fits
from seqvae.text import parse_size

# --- Sizes of memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GB", 6 * 10**9),
        ("6GiB", 6 * 2**30),
        ("6g", 6 * 10**9),
        ("900MB", 9 * 10**8),
        ("1.5 TiB", 3 * 2**39),
        ("6e9", 6 * 10**9),
        ("512", 512),
        ("512B", 512),
    ],
)
def test_sizes_of_memory_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "6 gigs", "-6GB", "0GB", "6,5GB", "inf", "nan", "1e40"])
def test_what_is_no_size_of_memory_is_refused_by_the_name_of_its_flag(text):
    with pytest.raises(ValueError, match=r"^--memory_limit must be "):
        parse_size(text)


def make_machine(root: Path, groups: str, **files: str) -> Path:
    """A /proc and a /sys; in the names of files __ stands for a slash."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("memory_", "memory.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_what_is_left_is_what_the_machine_says(tmp_path):
    assert available_memory(make_machine(tmp_path, "0::/\n")) == (8000 * 1024, "available now")


@pytest.mark.parametrize("group", ["/", "/outer/inner"])
def test_a_container_has_what_its_limit_leaves_without_files_that_can_be_dropped(tmp_path, group):
    files = {"memory_max": "5000\n", "memory_current": "3000", "memory_stat": "anon 5\ninactive_file 1000"}
    files |= {
        "outer__inner__memory_max": "max",
        "outer__inner__memory_current": "1",
        "outer__inner__memory_stat": "anon 1",
    }
    left = available_memory(make_machine(tmp_path, f"0::{group}\n", **files))
    assert left == (3000, "left of the limit of its control group")


def test_an_older_control_group_counts_as_well(tmp_path):
    old = {"memory__memory_limit_in_bytes": "5000", "memory__memory_usage_in_bytes": "4000"}
    left = available_memory(make_machine(tmp_path, "4:memory:/\n", memory__memory_stat="total_inactive_file 7", **old))
    assert left.bytes == 1007


# --- The search --------------------------------------------------------------------------------------------------------


class Machine:
    """Needs memory by a rule, and remembers what was tried."""

    def __init__(self, base: float, per_step: float, curvature: float = 0.0, deadly: float = float("inf")) -> None:
        self.base, self.per_step, self.curvature, self.deadly = base, per_step, curvature, deadly
        self.sizes: list[int] = []

    def need(self, size: int) -> int:
        return round(self.base + self.per_step * size + self.curvature * size * size)

    def peak_bytes(self, size: int) -> int | None:
        self.sizes.append(size)
        return None if self.need(size) > self.deadly else self.need(size)


@given(
    base=st.floats(1, 1e6),
    per_step=st.floats(0.1, 1e3),
    curvature=st.floats(0, 0.1),
    lowest=st.integers(1, 1000),
    times=st.floats(1, 1e4),
    deadly=st.floats(1, 4),
)
def test_the_largest_that_fits_is_found_to_the_resolution(base, per_step, curvature, lowest, times, deadly):
    machine = Machine(base, per_step, curvature)
    usable = machine.need(int(lowest * times))
    machine.deadly = deadly * usable
    found = largest_that_fits(machine.peak_bytes, lowest=lowest, highest=10**9, usable_bytes=usable)
    assert found is not None
    assert machine.need(found) <= usable < machine.need(int(found * (1 + RESOLUTION)) + 1)
    assert len(machine.sizes) == len(set(machine.sizes)) < 60


def test_no_try_is_more_than_twice_what_fitted_before():
    machine = Machine(base=1e6, per_step=1)
    largest_that_fits(machine.peak_bytes, lowest=100, highest=10**9, usable_bytes=9e6)
    fitted = [size for size in machine.sizes if machine.need(size) <= 9e6]
    assert all(
        size <= 2 * max(one for one in fitted if one < size or one == 100)
        for number, size in enumerate(machine.sizes)
        if number
    )


def test_where_need_is_linear_the_limit_is_hardly_passed():
    machine = Machine(base=1e6, per_step=10)
    largest_that_fits(machine.peak_bytes, lowest=100, highest=10**9, usable_bytes=9e6)
    assert max(map(machine.need, machine.sizes)) < 9e6 * (1 + 2 * RESOLUTION)


def test_nothing_is_found_where_the_lowest_does_not_fit():
    machine = Machine(base=10, per_step=1)
    assert largest_that_fits(machine.peak_bytes, lowest=100, highest=1000, usable_bytes=99) is None
    assert machine.sizes == [100]


def test_the_data_can_end_the_search():
    machine = Machine(base=10, per_step=1)
    assert largest_that_fits(machine.peak_bytes, lowest=100, highest=777, usable_bytes=1e6) == 777
    assert max(machine.sizes) == 777
