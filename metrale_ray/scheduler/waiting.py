# SPDX-License-Identifier: MIT OR Apache-2.0
"""`WaitingQueue`: the sequences that have no slot, in order of arrival.

Rules: first come, first served. A sequence that ran before and came back (preempted, or its slot was lost) stands
in front of every one that never ran, in order of arrival. As admission takes only the first, those that came back
arrived before all others, so the whole queue is in order of arrival.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict

from metrale_ray.scheduler.request import RequestId, Sequence


class WaitingQueue:
    """A queue from which any member can leave at no cost that grows with its length."""

    def __init__(self) -> None:
        self._returned: list[Sequence] = []  # at most as many as there are slots
        self._fresh: OrderedDict[RequestId, Sequence] = OrderedDict()  # its first member is found at once

    def __len__(self) -> int:
        return len(self._returned) + len(self._fresh)

    def add(self, sequence: Sequence) -> None:
        """A new sequence, to the end."""
        self._fresh[sequence.request_id] = sequence

    def put_back(self, sequence: Sequence) -> None:
        """A sequence that ran, to its place by arrival in front of all that never ran."""
        bisect.insort(self._returned, sequence, key=lambda other: other.arrival)

    def first(self) -> Sequence | None:
        """The next one to be admitted."""
        if self._returned:
            return self._returned[0]
        return next(iter(self._fresh.values()), None)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that is in the queue."""
        if self._fresh.pop(sequence.request_id, None) is None:
            self._returned.remove(sequence)
