# SPDX-License-Identifier: MIT OR Apache-2.0
"""The counter-based draw, against its authors' known answers and its own definition."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.sampling.philox import draw, philox4x32

ONES = 0xFFFFFFFF
# From the known-answer file of Random123 (philox4x32, 10 rounds): counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == expected


def test_the_draw_is_the_first_53_bits_of_the_documented_counter() -> None:
    words = philox4x32((0x89ABCDEF, 0x01234567, 5, 0), (0x76543210, 0xFEDCBA98))
    assert draw(0xFEDCBA9876543210, 5, 0x0123456789ABCDEF) == ((words[0] + words[1] * 2**32) // 2**11) / 2**53
    assert draw(0, 0, 0) == ((0x6627E8D5 + 0xE169C58D * 2**32) // 2**11) / 2**53


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_every_draw_is_at_least_zero_and_below_one(seed: int, sequence_index: int, position: int) -> None:
    value = draw(seed, sequence_index, position)
    assert 0.0 <= value < 1.0
    assert value * 2**53 == int(value * 2**53)


def test_seed_sequence_and_position_all_change_the_draw() -> None:
    inputs = [(seed, index, position) for seed in (0, 1, 2**32, 2**63) for index in range(4) for position in range(64)]
    inputs += [(0, 0, 2**32), (0, 0, 2**63)]
    assert len({draw(*each) for each in inputs}) == len(inputs)


@pytest.mark.parametrize("bad", [(-1, 0, 0), (2**64, 0, 0), (0, -1, 0), (0, 2**32, 0), (0, 0, -1), (0, 0, 2**64)])
def test_a_value_outside_its_range_is_refused_instead_of_wrapping(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be an integer from 0"):
        draw(*bad)


def test_draws_of_one_sequence_are_spread_evenly_and_independently() -> None:
    values = [draw(2024, 0, position) for position in range(20_000)]
    pairs = [0] * 64
    for first, second in itertools.pairwise(values):
        pairs[int(first * 8) * 8 + int(second * 8)] += 1
    expected = (len(values) - 1) / 64
    chi_square = sum((count - expected) ** 2 / expected for count in pairs)
    assert chi_square < 63 + 4 * math.sqrt(2 * 63)  # about four standard deviations, and the inputs are fixed
