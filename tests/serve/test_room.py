# SPDX-License-Identifier: MIT OR Apache-2.0
"""How much one front has on its way at a time, and in which order others follow."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.serve.room import Room


@given(size=st.integers(1, 6), counts=st.lists(st.integers(1, 8), max_size=12))
def test_no_more_is_held_than_there_is_and_nobody_is_passed_over(size: int, counts: list[int]) -> None:
    held, most, order = 0, 0, []

    async def hold(room: Room, number: int) -> None:
        nonlocal held, most
        async with room.places(counts[number]):
            order.append(number)
            held += min(counts[number], size)
            most = max(most, held)
            await asyncio.sleep(0)
            held -= min(counts[number], size)

    async def everybody() -> None:
        room = Room(size)
        await asyncio.gather(*(hold(room, number) for number in range(len(counts))))

    asyncio.run(everybody())
    assert most <= size
    assert order == list(range(len(counts)))


def test_who_gives_up_waiting_gives_back_what_it_held() -> None:
    async def script() -> None:
        room = Room(2)
        async with room.places(1):
            waiting = asyncio.ensure_future(room.places(2).__aenter__())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not waiting.done()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        async with asyncio.timeout(5), room.places(2):
            pass

    asyncio.run(script())
