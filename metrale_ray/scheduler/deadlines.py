# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Deadlines`: until when each request may take.

Rules: pure; times are seconds of whatever clock the caller reads, and now is an argument. A request has one deadline
or none. Asking who is late costs nothing while nobody is, and what has ended leaves no trace for long.
"""

from __future__ import annotations

import heapq

from metrale_ray.scheduler.request import RequestId

# Entries of requests that have ended stay in the heap until they are its top, or until they are more than the others.
_MIN_SWEEP = 64


class Deadlines:
    """The deadlines of live requests."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, RequestId]] = []
        self._by_request: dict[RequestId, float] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def add(self, request_id: RequestId, at_s: float) -> None:
        """`request_id`, which has none yet, is late from `at_s` on."""
        self._by_request[request_id] = at_s
        heapq.heappush(self._heap, (at_s, request_id))

    def drop(self, request_id: RequestId) -> None:
        """The request has ended. One without a deadline is no error."""
        if self._by_request.pop(request_id, None) is not None and len(self._heap) > 2 * len(self) + _MIN_SWEEP:
            self._heap = [(at_s, request_id) for request_id, at_s in self._by_request.items()]
            heapq.heapify(self._heap)

    def take_late(self, now_s: float) -> list[RequestId]:
        """The requests whose deadline has come, earliest first; they have none from now on."""
        late: list[RequestId] = []
        while self._heap and self._heap[0][0] <= now_s:
            _, request_id = heapq.heappop(self._heap)
            if self._by_request.pop(request_id, None) is not None:
                late.append(request_id)
        return late
