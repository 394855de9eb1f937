"""The comparison of two results to the last bit sees every difference, and says how large it is."""

import math

import pytest
import torch

from benchmarks.reliability.same_run import difference, flat

ONE = torch.tensor([1.0, math.nan])


def test_equal_values_have_no_difference_nan_included():
    assert difference({"weights": ONE, "row": math.nan}, {"weights": ONE.clone(), "row": math.nan}) == ""


def test_the_last_bit_of_a_weight_is_a_difference_with_its_size():
    other = {"layer": torch.nextafter(torch.ones(2), torch.tensor([1.0, 2.0])), "bias": torch.zeros(1)}
    text = difference({"layer": torch.ones(2), "bias": torch.zeros(1)}, other)
    assert text == "1 of 2 differ, by 1.2e-07 at most (layer)"


def test_texts_of_numbers_are_measured_and_the_largest_difference_is_named():
    text = difference({"row 0": "1.5", "row 1": "2"}, {"row 0": "1.25", "row 1": "2.125"})
    assert text == "2 of 2 differ, by 0.25 at most (row 0)"


@pytest.mark.parametrize("other", [{}, {"step": "collapsed"}, {"step": None}])
def test_what_is_missing_or_no_number_is_a_difference(other):
    assert "step is healthy and" in difference({"step": "healthy"}, other)


def test_a_type_is_part_of_a_value():
    assert difference({"weights": torch.ones(1)}, {"weights": torch.ones(1).double()})
    assert difference({"step": 1}, {"step": 1.0})


def test_an_added_value_is_a_difference():
    assert difference(flat({"rows": [1]}), flat({"rows": [1, 2]})) == "1 of 2 differ, .rows[1] is nothing and 2"
