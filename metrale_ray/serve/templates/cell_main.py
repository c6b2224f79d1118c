# SPDX-License-Identifier: MIT OR Apache-2.0
"""The process of a `Cell`: reads one piece of work after another from file descriptor 0, and answers each.

Rules. It imports jinja2 and the standard library, and then nothing more: from before the first work it can open no
file, no socket and no pipe, write no file, and take no more memory than its first argument says, in bytes. It has none
of its parent's environment, and ends with its parent. Its parent ends it when it takes too long.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from typing import Any

from metrale_ray.process_end import die_with_parent
from metrale_ray.serve.templates.environment import lay_out
from metrale_ray.serve.templates.outcome import LENGTH, Outcome


def main() -> None:
    """Answer until the other end is closed, or the memory is used up."""
    die_with_parent()
    channel = socket.socket(fileno=0)
    _import_the_rest()
    _limit(int(sys.argv[1]))
    _send(channel, Outcome.READY, "")
    while (work := _receive(channel)) is not None:
        outcome, text = _done(work)
        del work
        _send(channel, outcome, text)
        if outcome is Outcome.NO_MEMORY:
            return


WARM_UP = ("{% for i in [1.5] %}{{ 'a\\n'|tojson ~ strftime_now('%c') }}{% endfor %}", "{{ 1 // 0 }}", "{% for")
"""One that succeeds, one that fails and one that does not parse: what they import is there for those that follow."""


def _import_the_rest() -> None:
    """What jinja2 and the library below it would read from files only when it is needed."""
    import pprint  # noqa: F401
    import textwrap  # noqa: F401

    import jinja2.constants
    import jinja2.debug  # noqa: F401

    time.tzset()
    for template in WARM_UP:
        lay_out(template, {}, 100)


def _limit(memory_bytes: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for none in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
        resource.setrlimit(none, (0, 0))


def _done(frame: bytes) -> tuple[Outcome, str]:
    try:
        work: dict[str, Any] = json.loads(frame)
    except MemoryError:
        return Outcome.NO_MEMORY, "the messages need more memory than it is given"
    return lay_out(work["template"], work["variables"], work["max_characters"], work["continue_at"])


def _send(channel: socket.socket, outcome: Outcome, text: str) -> None:
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        outcome, content = Outcome.FAILED, f"character {error.start} of the text is a lone surrogate".encode()
    except MemoryError:
        outcome, content = Outcome.NO_MEMORY, b"the text needs more memory than it is given"
    channel.sendall(LENGTH.pack(1 + len(content)) + bytes([outcome]))
    channel.sendall(content)


def _receive(channel: socket.socket) -> bytes | None:
    """The next frame, or None when the parent has closed its end."""
    head = _exactly(channel, LENGTH.size)
    return None if head is None else _exactly(channel, *LENGTH.unpack(head))


def _exactly(channel: socket.socket, count: int) -> bytes | None:
    content = bytearray(count)
    rest = memoryview(content)
    while rest:
        got = channel.recv_into(rest)
        if got == 0:
            return None
        rest = rest[got:]
    return bytes(content)


if __name__ == "__main__":
    main()
