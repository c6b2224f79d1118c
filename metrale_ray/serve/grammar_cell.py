# SPDX-License-Identifier: MIT OR Apache-2.0
"""The process of a `Cell` that looks at grammars: reads one text after another from file descriptor 0, answers each.

Rules. It takes no more memory than its first argument says, in bytes, writes no file, and ends with its parent, which
ends it when it takes too long. It gives way to the engine where there are few cores.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from typing import BinaryIO, cast

from metrale_ray.errors import RequestError
from metrale_ray.grammar.check import check_text
from metrale_ray.process_end import die_with_parent
from metrale_ray.serve.templates.outcome import LENGTH, MAX_REASON_CHARACTERS, Outcome

NICENESS = 5
WARM_UP = 'start: "a"'
"""Its check imports what the others need."""


def main() -> None:
    """Answer until the other end is closed."""
    die_with_parent()
    os.nice(NICENESS)
    memory_bytes = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for none in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(none, (0, 0))
    _answer_of(WARM_UP)
    with cast(BinaryIO, socket.socket(fileno=0).makefile("rwb")) as channel:
        _send(channel, Outcome.READY, "")
        while (text := _receive(channel)) is not None:
            _send(channel, *_answer_of(text))


def _answer_of(text: str) -> tuple[Outcome, str]:
    try:
        check_text(text)
    except RequestError as error:
        return Outcome.REFUSED, error.message
    return Outcome.TEXT, ""


def _send(channel: BinaryIO, outcome: Outcome, text: str) -> None:
    content = bytes([outcome]) + text[:MAX_REASON_CHARACTERS].encode(errors="replace")
    channel.write(LENGTH.pack(len(content)) + content)
    channel.flush()


def _receive(channel: BinaryIO) -> str | None:
    """The next text, or None when the parent has closed its end."""
    head = channel.read(LENGTH.size)
    return channel.read(*LENGTH.unpack(head)).decode() if len(head) == LENGTH.size else None


if __name__ == "__main__":
    main()
