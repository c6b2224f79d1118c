# SPDX-License-Identifier: MIT OR Apache-2.0
"""`excerpt`: a value from a file as a message shows it, on one line and never long, whatever it is."""

from __future__ import annotations

import reprlib
from typing import Any

MAX_CHARACTERS = 120
MAX_ITEMS = 8
MAX_LEVELS = 3


def excerpt(value: Any) -> str:
    """The value as Python writes it, with the middle of what is long left out."""
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxlong = shortener.maxother = MAX_CHARACTERS
    shortener.maxlist = shortener.maxdict = MAX_ITEMS
    shortener.maxlevel = MAX_LEVELS
    text = shortener.repr(value)
    half = MAX_CHARACTERS // 2
    return text if len(text) <= MAX_CHARACTERS else f"{text[:half]}...{text[-half:]}"
