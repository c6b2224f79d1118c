# SPDX-License-Identifier: MIT OR Apache-2.0
"""`read_trace`: times and lengths of requests that some service had, from a CSV file, gzipped or not.

The columns are those of the Azure LLM inference traces: TIMESTAMP, ContextTokens, GeneratedTokens. Further columns are
ignored. Rows may be out of order; times count from the earliest.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from metrale_ray.errors import UserError
from metrale_ray.traffic.lengths import MAX_LENGTH

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MAX_ROWS = 10_000_000  # a day of a large service; more is some other file
GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a recording: seconds after the first, and tokens in and out."""

    at_s: float
    num_input: int
    num_output: int


def read_trace(path: str) -> list[Arrival]:
    """The arrivals in the file, in order of time, at least one. Raises UserError that names the line."""
    try:
        rows = [(time, num_input, num_output) for time, num_input, num_output in _rows(path)]
    except OSError as error:  # a damaged gzip file is one as well
        raise UserError(f"cannot read the trace {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error, EOFError, zlib.error) as error:
        raise UserError(f"the trace {path} is no CSV text: {error}") from error
    if not rows:
        raise UserError(f"the trace {path} has no requests; each line is {','.join(COLUMNS)}")
    rows.sort(key=lambda row: row[0])
    start = rows[0][0]
    return [Arrival((time - start).total_seconds(), num_input, num_output) for time, num_input, num_output in rows]


def _rows(path: str) -> Iterator[tuple[datetime, int, int]]:
    with Path(path).open("rb") as file:
        is_gzip = file.read(2) == GZIP_MAGIC
    opened = gzip.open if is_gzip else open
    with opened(path, "rt", encoding="utf-8-sig", newline="") as text:
        reader = csv.DictReader(text)
        missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise UserError(f"the trace {path} has no column {', '.join(missing)}; its first line must name {COLUMNS}")
        for row in reader:
            place = f"{path}:{reader.line_num}"
            if reader.line_num > MAX_ROWS:
                raise UserError(f"{place}: a trace may have {MAX_ROWS} lines at most; give a part of it")
            yield _time(row, place), _count(row, COLUMNS[1], place), _count(row, COLUMNS[2], place)


def _time(row: Mapping[str, str | None], place: str) -> datetime:
    text = row[COLUMNS[0]] or ""
    try:
        # Python reads six digits of a second at most; the traces have seven.
        whole, dot, fraction = text.partition(".")
        time = datetime.fromisoformat(f"{whole}.{fraction[:6]}" if dot and fraction.isdigit() else text)
    except ValueError as error:
        raise UserError(
            f"{place}: {COLUMNS[0]} is {text[:40]!r}; it must be a time such as 2023-11-16 18:17:03.97"
        ) from error
    return time.replace(tzinfo=None)


def _count(row: Mapping[str, str | None], column: str, place: str) -> int:
    text = row[column] or ""
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) <= MAX_LENGTH):
        raise UserError(f"{place}: {column} is {text[:40]!r}; it must be an integer from 0 to {MAX_LENGTH}")
    return max(1, int(text))  # a request of nothing cannot be sent
