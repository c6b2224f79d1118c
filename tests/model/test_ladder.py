# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import pytest

from metrale_ray.model.ladder import DECODE_BATCH_LADDER, padded_batch_n


def test_every_batch_up_to_300_is_padded_to_the_smallest_rung_that_holds_it() -> None:
    for n in range(1, 301):
        rungs = [rung for rung in DECODE_BATCH_LADDER if rung >= n]
        assert padded_batch_n(n) == (min(rungs) if rungs else n)


def test_the_rungs_are_the_published_ones() -> None:
    pairs = {1: 2, 3: 4, 5: 8, 9: 12, 13: 16, 17: 24, 25: 32, 33: 48, 65: 96, 97: 128, 129: 129}
    assert {n: padded_batch_n(n) for n in pairs} == pairs


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        padded_batch_n(0)
