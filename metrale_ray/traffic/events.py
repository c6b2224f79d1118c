# SPDX-License-Identifier: MIT OR Apache-2.0
"""`EventReader`: the data of server-sent events, out of the pieces in which bytes arrive.

It is the part of the specification (https://html.spec.whatwg.org/multipage/server-sent-events.html) that answers of
this API use: `data` fields, comments and other fields ignored, lines that end in LF or CR LF. What it leaves out: a CR
alone as the end of a line, and `id` and `retry`, since a stream of tokens is never taken up again.
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_EVENT_BYTES = 8 * 2**20


class EventTooLong(Exception):
    """A server sends a line without an end."""


class EventReader:
    """Takes bytes in any pieces and gives each event's data once its last byte is there."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of the events that `piece` completes. Raises EventTooLong."""
        *lines, rest = piece.split(b"\n")
        if lines:
            lines[0] = self._rest + lines[0]
            self._rest = rest
        else:
            self._rest += rest
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            yield from self._take(line.removesuffix(b"\r"))

    def _take(self, line: bytes) -> Iterator[bytes]:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            data, self._data = b"\n".join(self._data), []
            yield data
