# SPDX-License-Identifier: MIT OR Apache-2.0
"""Records as bytes, and back.

Rules: one msgpack map per record; `kind` comes first and says which record it is, every other key is the name of a
field. Fields that a reader does not know are passed over, and a kind that it does not know is `Unknown`, so that
journals of other builds can be read. Texts that are too long are cut when written, so that whatever was written can
be read. Everything is checked when read, as frames are (see `protocol.fields`): a journal may come from anywhere.

What is left out: the fields of each record (`life_records`, `step_records`); lengths, checksums and files (`segments`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from metrale_ray.errors import FrameError
from metrale_ray.protocol.fields import Bounds, Fields, pack_value, unpack_frame
from metrale_ray.protocol.journal.life_records import (
    read_admitted,
    read_closed,
    read_ended,
    read_gap,
    read_refused,
    read_snapshot,
    read_started,
    write_admitted,
    write_closed,
    write_ended,
    write_gap,
    write_refused,
    write_snapshot,
    write_started,
)
from metrale_ray.protocol.journal.record_fields import MAX_LIST
from metrale_ray.protocol.journal.records import (
    Admitted,
    Answered,
    Closed,
    Commanded,
    Ended,
    Gap,
    ReadRecord,
    Record,
    Refused,
    Sampled,
    Snapshot,
    Started,
    Unknown,
)
from metrale_ray.protocol.journal.step_records import (
    read_answered,
    read_commanded,
    read_sampled,
    write_answered,
    write_commanded,
    write_sampled,
)
from metrale_ray.protocol.limits import MAX_FRAME_BYTES, MAX_KEY_CHARS

MAX_RECORD_BYTES = 32 * 2**20
"""One record: the largest frame and what is said about it, or a snapshot of a full queue of usual prompts."""

MAX_RECORD_DEPTH = 12
"""Containers inside containers: a snapshot's parameters with their lists take 7, and the rest is room."""

MAX_RECORD_ELEMENTS = 2**20
"""Elements of all maps and arrays of one record: 30 for each of 10,000 requests that wait, three times over."""

RECORD_BOUNDS = Bounds(MAX_RECORD_BYTES, MAX_RECORD_DEPTH, MAX_RECORD_ELEMENTS, MAX_LIST, MAX_FRAME_BYTES)

_KINDS: dict[type[Any], str] = {
    Started: "started",
    Snapshot: "snapshot",
    Admitted: "admitted",
    Refused: "refused",
    Commanded: "commanded",
    Answered: "answered",
    Sampled: "sampled",
    Ended: "ended",
    Gap: "gap",
    Closed: "closed",
}
_WRITERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "started": write_started,
    "snapshot": write_snapshot,
    "admitted": write_admitted,
    "refused": write_refused,
    "commanded": write_commanded,
    "answered": write_answered,
    "sampled": write_sampled,
    "ended": write_ended,
    "gap": write_gap,
    "closed": write_closed,
}
_READERS: dict[str, Callable[[Fields], Record]] = {
    "started": read_started,
    "snapshot": read_snapshot,
    "admitted": read_admitted,
    "refused": read_refused,
    "commanded": read_commanded,
    "answered": read_answered,
    "sampled": read_sampled,
    "ended": read_ended,
    "gap": read_gap,
    "closed": read_closed,
}


def encode_record(record: Record) -> bytes:
    """The bytes of `record`. Raises FrameError for one that is too large, or holds what no record may hold."""
    kind = _KINDS.get(type(record))
    if kind is None:
        raise FrameError(f"{type(record).__name__} is no record of a journal")
    data = pack_value({"kind": kind, **_WRITERS[kind](record)}).data
    if len(data) > MAX_RECORD_BYTES:
        raise FrameError(f"a record has at most {MAX_RECORD_BYTES} bytes", num_bytes=len(data))
    return data


def decode_record(data: bytes) -> ReadRecord:
    """The record in `data`; Unknown for one of another build. Raises FrameError for anything else."""
    fields = unpack_frame(data, bounds=RECORD_BOUNDS)
    kind = fields.text("kind", MAX_KEY_CHARS)
    read = _READERS.get(kind)
    return Unknown(kind) if read is None else read(fields)
