# SPDX-License-Identifier: MIT OR Apache-2.0
"""The loop turns while much is done, and not for a little."""

from __future__ import annotations

import asyncio

import pytest

from metrale_ray.serve.openai.pace import ITEMS_IN_ONE_TURN, Pace
from tests.serve.openai.turns import turns_of


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([ITEMS_IN_ONE_TURN - 1], 0),
        ([ITEMS_IN_ONE_TURN], 1),
        ([1] * (3 * ITEMS_IN_ONE_TURN), 3),
        ([10 * ITEMS_IN_ONE_TURN, 1], 1),
    ],
)
def test_the_loop_turns_once_so_many_items_are_done_however_they_are_counted(parts: list[int], expected: int) -> None:
    async def work() -> None:
        pace = Pace()
        for part in parts:
            await pace.did(part)

    assert asyncio.run(turns_of(work()))[1] == expected
