# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a process keeps for good is passed over by the collector, and what is made afterwards is not."""

from __future__ import annotations

import gc
import weakref

from metrale_ray.process_memory import forget_start


class Node:
    """One of a cycle."""

    def __init__(self) -> None:
        self.other: Node | None = None


def cycle() -> weakref.ref[Node]:
    first, second = Node(), Node()
    first.other, second.other = second, first
    return weakref.ref(first)


def test_what_is_there_is_passed_over_and_later_garbage_is_not() -> None:
    garbage = cycle()
    try:
        forget_start()
        assert garbage() is None
        assert gc.get_freeze_count() > 0
        later = cycle()
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
