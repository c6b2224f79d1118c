# SPDX-License-Identifier: MIT OR Apache-2.0
"""SIGTERM for a command: it interrupts what the main thread does, as Ctrl-C would, and everything cleans up alike.

A clean-up that takes too long is cut short: whoever sent the signal may have sent it to Ray's processes as well, and
Ray waits a minute for those. Everything that a command has started ends with it.

KeyboardInterrupt itself is raised, because Ray's own code looks for signals while it waits and knows no other. Which
of the two signals it was is asked afterwards.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143
CLEAN_UP_S = 12.0  # a head that finishes its step and is told to end has 10
_came: list[int] = []  # SIGTERM, once it has come; a fact of the process, as signals are


def interrupt_at_sigterm() -> None:
    """From now on SIGTERM raises KeyboardInterrupt in the main thread; a second one does not cut the clean-up short."""
    signal.signal(signal.SIGTERM, _interrupt)


def was_terminated() -> bool:
    """Whether the interrupt was SIGTERM."""
    return bool(_came)


def limit_clean_up(signal_number: int) -> None:
    """End the process in a while, if its clean-up has not by then. For whoever handles signals by itself."""
    if signal_number == signal.SIGTERM:
        _came.append(signal_number)
    limit = threading.Timer(CLEAN_UP_S, _leave)
    limit.daemon = True
    limit.start()


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    if not _came:
        limit_clean_up(signal_number)
        raise KeyboardInterrupt


def _leave() -> None:
    os.write(2, b"terminated, before everything was cleaned up\n")
    os._exit(TERMINATED if _came else INTERRUPTED)
