"""Text for terminals: histograms and tables to the letter, and nothing in them that a terminal would obey."""

import io
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqvae.reports.data_report import without_advice
from seqvae.reports.previews import Preview, preview_page, read_preview
from seqvae.reports.terminal import MOST_BINS, Ink, bin_edges, histogram, ink_for, section, table
from seqvae.text import cells, visible

PLAIN = Ink(width=40, blocks=False)


def test_a_histogram_to_the_letter():
    lengths = {"train": np.repeat([1, 2, 4], [5, 10, 1]), "valid": np.array([2, 2, 3])}
    assert histogram(lengths, 100, PLAIN) == [
        "  steps                     train  valid",
        "      1  ########               5      0",
        "      2  #################     10      2",
        "      3                         0      1",
        "      4  ##                     1      0",
    ]


def test_bins_beyond_the_length_cap_stand_behind_a_line():
    assert histogram({"train": np.repeat([1, 3, 5], [3, 2, 1])}, 3, PLAIN) == [
        "  steps                            train",
        "      1  ########################      3",
        "      2                                0",
        "      3  ################              2",
        "         -- over --max_sequence_length 3 ",
        "      4                                0",
        "      5  ########                      1",
    ]


def test_bins_are_as_wide_as_people_would_choose_and_end_where_the_lengths_do():
    lines = histogram({"train": np.repeat([4, 21, 38, 60], [3, 1200, 800, 1])}, 1000, PLAIN)
    assert [line[:7].strip() for line in lines[1:]] == [
        *("4", "5-9", "10-14", "15-19", "20-24", "25-29", "30-34", "35-39"),
        *("40-44", "45-49", "50-54", "55-59", "60"),
    ]
    assert lines[5] == "  20-24  ########################  1,200"
    assert lines[1] == "      4  #                             3"  # what is more than nothing is seen


@given(st.lists(st.integers(1, 5_000), min_size=1, max_size=200), st.integers(1, 5_000))
def test_bins_hold_every_length_once_and_one_ends_with_the_cap(lengths, cap):
    lengths = np.array(lengths)
    edges = bin_edges(lengths, cap)
    assert (np.diff(edges) > 0).all()
    assert (edges[0], edges[-1]) == (lengths.min(), lengths.max() + 1)
    assert len(edges) - 1 <= MOST_BINS + 1
    if lengths.min() <= cap < lengths.max():
        assert cap + 1 in edges


class Row(NamedTuple):
    name: str
    seen: int
    nothing: None
    share: float | None


ROWS = [Row("体温", 12_345, None, 0.5), Row("a\x1b[2J", 7, None, None)]


def test_a_table_to_the_letter():
    assert table(ROWS, PLAIN, {"share": "{:.1f}".format}) == [
        "  name        seen  share",
        "  体温      12,345    0.5",
        "  a\\x1b[2J       7      -",
    ]


def test_a_table_too_wide_for_the_paper_takes_it_from_its_text():
    lines = table([Row("x" * 50, 1, None, None)], PLAIN)
    assert lines[1] == f"  {'x' * 31}.     1"
    assert max(map(cells, lines)) == 40


def test_a_section_says_how_many_rows_it_leaves_out():
    assert section("Title", ROWS, PLAIN, most=1, total=9)[-1] == "  ... and 8 more"
    assert section("Title", [], PLAIN) == []


@given(st.text())
def test_whatever_is_shown_is_printable(text):
    assert visible(text).isprintable()


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "colour"),
    [
        ({"TERM": "xterm", "WT_SESSION": "1"}, True),
        ({"NO_COLOR": "1", "WT_SESSION": "1"}, False),
        ({"TERM": "dumb"}, False),
    ],
)
def test_colours_are_for_terminals_that_show_them_and_people_who_want_them(environment, colour):
    assert ink_for(Terminal(), environment).colour is colour


def test_a_pipe_gets_80_columns_without_colours_and_bars_that_its_encoding_can_write():
    assert ink_for(io.TextIOWrapper(io.BytesIO(), "utf-8"), {}) == Ink(80, colour=False, blocks=True)
    assert ink_for(io.TextIOWrapper(io.BytesIO(), "ascii"), {}) == Ink(80, colour=False, blocks=False)


def test_colour_is_added_to_what_is_readable_without_it():
    assert Ink(colour=True).bold("Lengths") == "\x1b[1mLengths\x1b[0m"
    assert Ink(colour=False).bold("Lengths") == "Lengths"


def test_advice_is_given_for_one_message_and_not_repeated_for_many():
    one, other = "a.parquet: is empty. Write it again.", "b.parquet: is cut. Write it again."
    assert without_advice([one]) == [one]
    assert without_advice([one, other]) == ["a.parquet: is empty.", "b.parquet: is cut."]


def test_a_preview_of_many_lines_comes_back_with_its_blanks(tmp_path):
    original = " ".join(str(number % 32) for number in range(200))
    path = tmp_path / "step-0000001.txt"
    path.write_text(preview_page("step 1", [original], ["a  b"], [original]), encoding="utf-8")
    assert read_preview(path) == Preview("step 1", ((original, "a  b"),), (original,))
