"""Real runs to which something happens, compared with a run to which nothing did."""

import pytest

pytest.register_assert_rewrite("tests.faults.runs")
