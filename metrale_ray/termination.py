# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Terminated`: SIGTERM as an exception in the main thread, so that it unwinds through the same clean-up as Ctrl-C."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn


class Terminated(BaseException):
    """The process was asked to end."""


def raise_at_sigterm() -> None:
    """From now on SIGTERM raises `Terminated` in the main thread; a second one does not cut the clean-up short."""
    signal.signal(signal.SIGTERM, _raise)


def _raise(signal_number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
