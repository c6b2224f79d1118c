# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Outcome`: what became of one piece of work that a template's process was given, and how both sides frame it.

Rules: a frame is its length in `LENGTH`, then so many bytes. To the process goes JSON; back comes one byte, the
outcome, and then UTF-8 text: what was laid out, or why not. Nothing that arrives is ever run or unpickled.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

LENGTH = Struct(">I")
MAX_REASON_CHARACTERS = 1000
"""Of a message of a template, which may be built from what a client sent."""


class Outcome(IntEnum):
    """The first byte of an answer."""

    READY = 0  # the process has started; no work was done
    TEXT = 1  # the text
    REFUSED = 2  # the template called raise_exception: its message
    UNREADABLE = 3  # the template does not parse: why
    FAILED = 4  # the template failed on what it was given: why
    TOO_LONG = 5  # the text passed its limit
    NO_MEMORY = 6  # the process reached its limit of memory, and ends
