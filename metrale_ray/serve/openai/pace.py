# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Pace`: how much is done in one turn of the event loop, of work that holds the interpreter's lock in a thread too.

Rule: one `Pace` goes through all parts of a call's work, so that many small parts let others in too.
"""

from __future__ import annotations

import asyncio

ITEMS_IN_ONE_TURN = 2048
"""Items are what takes about a microsecond, such as one likely token: a turn takes a few milliseconds."""


class Pace:
    """Counts what was done since the loop turned."""

    def __init__(self, items_in_one_turn: int = ITEMS_IN_ONE_TURN) -> None:
        self._items_in_one_turn = items_in_one_turn
        self._num_done = 0

    async def did(self, num_items: int) -> None:
        """So many items were done just now: let the loop turn when it is time."""
        self._num_done += num_items
        if self._num_done >= self._items_in_one_turn:
            self._num_done = 0
            await asyncio.sleep(0)
