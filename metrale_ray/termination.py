# SPDX-License-Identifier: MIT OR Apache-2.0
"""SIGTERM for a command: it interrupts what the main thread does, as Ctrl-C would, and everything cleans up alike.

KeyboardInterrupt itself is raised, because Ray's own code looks for signals while it waits and knows no other. Which
of the two signals it was is asked afterwards.
"""

from __future__ import annotations

import signal
from types import FrameType

_came: list[int] = []  # SIGTERM, once it has come; a fact of the process, as signals are


def interrupt_at_sigterm() -> None:
    """From now on SIGTERM raises KeyboardInterrupt in the main thread; a second one does not cut the clean-up short."""
    signal.signal(signal.SIGTERM, _interrupt)


def was_terminated() -> bool:
    """Whether the interrupt was SIGTERM."""
    return bool(_came)


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    if not _came:
        _came.append(signal_number)
        raise KeyboardInterrupt
