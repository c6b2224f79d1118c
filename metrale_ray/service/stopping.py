# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Stopping`: what signals ask of a service that runs: the first to end in order, the second to end at once.

Rules: SIGTERM and SIGINT count alike. A handler only notes what came; the main thread waits for it. It is used from
when the service is ready; until then a signal interrupts the start, as it does with every command.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopping:
    """Which signals have come."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        self._changed = threading.Event()

    @contextmanager
    def handled(self) -> Iterator[Stopping]:
        """Note the signals in here, in place of what their handlers did. For the main thread."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:
            if before[number] is not signal.SIG_IGN:  # a shell's background job ignores interrupts
                signal.signal(number, self._note)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def is_asked(self) -> bool:
        """Whether the service is to end."""
        return bool(self.signals)

    @property
    def is_urgent(self) -> bool:
        """Whether it is to end at once."""
        return len(self.signals) > 1

    def wait(self, timeout_s: float) -> None:
        """Wait until something changes, or the time is up."""
        self._changed.wait(timeout_s)
        self._changed.clear()

    def wake(self) -> None:
        """End the wait: something else has changed."""
        self._changed.set()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        self._changed.set()
