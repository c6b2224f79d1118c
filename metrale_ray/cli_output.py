# SPDX-License-Identifier: MIT OR Apache-2.0
"""How commands write what they found: one strict JSON object, tables, and sizes for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# Wide enough for a path; a file or a pipe has no width of its own.
WIDTH_WITHOUT_TERMINAL = 200


def write_object(answers: TextIO, value: Mapping[str, Any]) -> None:
    """One line that any JSON reader takes: no NaN, no infinity."""
    answers.write(json.dumps(value, allow_nan=False) + "\n")
    answers.flush()


def console(answers: TextIO) -> Console:
    """Where tables are printed. Texts are shown as they are, brackets included."""
    from rich.console import Console

    width = None if answers.isatty() else WIDTH_WITHOUT_TERMINAL
    return Console(file=answers, width=width, highlight=False, markup=False, emoji=False)


def size_text(num_bytes: int) -> str:
    """Bytes in the largest unit of 1024 that leaves at least 1."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
