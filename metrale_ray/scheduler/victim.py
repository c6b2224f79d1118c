# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which running sequence is preempted when blocks run out.

Rules: never the oldest one, so that there always is one that goes on to its end. Of the others, the one with the fewest
generated tokens, as least is computed again for it; the newest of equals. A resumed sequence is passed over until it
has generated some tokens again; when that leaves none, the newest one goes.
"""

from __future__ import annotations

from collections.abc import Collection

from metrale_ray.scheduler.request import Sequence


def choose_victim(running: Collection[Sequence], protection_tokens: int) -> Sequence:
    """The sequence of `running` to preempt. There must be two at least: one alone has the whole cache to take from."""
    oldest = min(running, key=_arrival)
    others = [sequence for sequence in running if sequence is not oldest]
    assert others, "the oldest sequence does not fit alone, and should have been refused"
    unprotected = [sequence for sequence in others if not sequence.is_protected(protection_tokens)]
    if not unprotected:
        return max(others, key=_arrival)
    return min(unprotected, key=lambda sequence: (sequence.num_generated, -sequence.arrival))


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
