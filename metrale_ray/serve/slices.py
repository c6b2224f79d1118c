# SPDX-License-Identifier: MIT OR Apache-2.0
"""`slices`: a long list in parts, so that whoever looks at all of it in a thread lets other threads in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

SLICE_ITEMS = 2**16
"""Looked at in about a millisecond by one call of a builtin, which no other thread can interrupt."""


def slices(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """`items` in order, in parts of at most `SLICE_ITEMS`; a short list comes as it is."""
    if len(items) <= SLICE_ITEMS:
        yield items
        return
    for start in range(0, len(items), SLICE_ITEMS):
        yield items[start : start + SLICE_ITEMS]
