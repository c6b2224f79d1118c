# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Feed`: a transport whose next frame a test puts there, and which keeps nothing of what is sent."""

from __future__ import annotations

from collections import deque


class Feed:
    """One end of a connection of which the test is the other end. Nothing waits."""

    def __init__(self) -> None:
        self._inbox: deque[bytes] = deque()

    def put(self, data: bytes) -> None:
        """What `receive` gives next."""
        self._inbox.append(data)

    def send(self, data: bytes) -> None:
        """See Transport. Lost on purpose."""

    def receive(self, timeout_s: float | None) -> bytes:
        """See Transport. Raises TimeoutError when nothing was put."""
        if not self._inbox:
            raise TimeoutError("nothing was put")
        return self._inbox.popleft()

    def lost(self) -> str | None:
        """See Transport."""
        return None

    def close(self) -> None:
        """See Transport."""
