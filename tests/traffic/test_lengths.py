# SPDX-License-Identifier: MIT OR Apache-2.0
"""Lengths are read from a text and drawn from what it means."""

from __future__ import annotations

from random import Random

import pytest

from metrale_ray.errors import UserError
from metrale_ray.traffic.lengths import MAX_LENGTH, read_lengths


def test_a_number_is_always_that_number() -> None:
    lengths = read_lengths("128")
    assert {lengths.draw(Random(seed)) for seed in range(50)} == {128}


def test_uniform_reaches_both_ends_and_nothing_beyond() -> None:
    lengths, random = read_lengths("uniform:3:6"), Random(0)
    assert {lengths.draw(random) for _ in range(200)} == {3, 4, 5, 6}


def test_lognormal_has_the_mean_that_was_given() -> None:
    lengths, random = read_lengths("lognormal:200:0.8"), Random(0)
    drawn = [lengths.draw(random) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(200, rel=0.03)
    assert len(set(drawn)) > 300


def test_lognormal_without_a_spread_is_its_mean() -> None:
    assert {read_lengths("lognormal:50:0").draw(Random(seed)) for seed in range(20)} == {50}


def test_what_is_drawn_stays_within_bounds() -> None:
    lengths, random = read_lengths(f"lognormal:{MAX_LENGTH // 8}:3"), Random(0)
    drawn = [lengths.draw(random) for _ in range(5_000)]
    assert min(drawn) == 1
    assert max(drawn) == MAX_LENGTH


NO_LENGTHS = ["", "0", "-1", "1.5", "many", "12:", "uniform:1", "uniform:5:4", "uniform:0:4", "uniform:1:2:3", "²"]
NO_DISTRIBUTIONS = ["normal:1:2", "lognormal:5", "lognormal:0:1", "lognormal:5:-1", "lognormal:5:nan", "lognormal:5:11"]


@pytest.mark.parametrize("text", [*NO_LENGTHS, *NO_DISTRIBUTIONS, str(MAX_LENGTH + 1)])
def test_a_text_that_is_no_length_is_refused_with_what_can_be_written(text: str) -> None:
    with pytest.raises(UserError) as caught:
        read_lengths(text)
    assert repr(text) in caught.value.message
    assert "must be" in caught.value.message or "write" in caught.value.message
