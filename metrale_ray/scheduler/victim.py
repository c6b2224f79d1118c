# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which running sequence is preempted when blocks run out.

Rules: never the first in order (priority, then arrival), so that there always is one that goes on to its end. Of the
others, one of the lowest priority there is. Among those the one with the fewest generated tokens, as least is computed
again for it; the newest of equals. A resumed sequence is passed over until it has generated some tokens again; when
that leaves none of that priority, the newest of them goes.
"""

from __future__ import annotations

from collections.abc import Collection

from metrale_ray.scheduler.request import Sequence


def choose_victim(running: Collection[Sequence], protection_tokens: int) -> Sequence:
    """The sequence of `running` to preempt. There must be two at least: one alone has the whole cache to take from."""
    first = min(running, key=_order)
    others = [sequence for sequence in running if sequence is not first]
    assert others, "the first sequence does not fit alone, and should have been refused"
    lowest = max(sequence.request.priority for sequence in others)
    lowest_ones = [sequence for sequence in others if sequence.request.priority == lowest]
    unprotected = [sequence for sequence in lowest_ones if not sequence.is_protected(protection_tokens)]
    if not unprotected:
        return max(lowest_ones, key=_order)
    return min(unprotected, key=lambda sequence: (sequence.num_generated, -sequence.arrival))


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
