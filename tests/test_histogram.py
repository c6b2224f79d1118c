# SPDX-License-Identifier: MIT OR Apache-2.0
"""Histograms as plain counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.histogram import REQUEST_BOUNDS_S, Histogram


def test_a_bound_is_inclusive_and_what_is_above_the_last_is_counted() -> None:
    histogram = Histogram((1.0, 2.0))
    for seconds in (0.0, 1.0, 1.5, 2.0, 2.5, 1e9):
        histogram.observe(seconds)
    assert histogram.document() == {"bounds_s": [1.0, 2.0], "counts": [2, 2, 2], "sum_s": 1e9 + 7.0}


@given(st.lists(st.floats(0, 10_000)))
def test_every_value_is_counted_once_where_it_belongs(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    told = histogram.document()
    for index, bound in enumerate(REQUEST_BOUNDS_S):
        assert sum(told["counts"][: index + 1]) == sum(value <= bound for value in values)
    assert sum(told["counts"]) == len(values)
    assert told["sum_s"] == pytest.approx(sum(values))
