# SPDX-License-Identifier: MIT OR Apache-2.0
"""A process that writes a journal: `python -m tests.protocol.journal.noting_process FOLDER NUMBER LAST`.

It prints its folder once it has noted NUMBER commands, notes up to LAST, and ends when its input does.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from metrale_ray.protocol.journal.writer import JournalWriter
from tests.protocol.journal.samples import SNAPSHOT, STARTED, commanded

MAX_BYTES = 2**20
PACE_S = 0.002


def main(folder: str, number: int, last: int) -> None:
    """Note, with a moment for the disk after each command."""
    pace = threading.Event()
    journal = JournalWriter(Path(folder), max_bytes=MAX_BYTES, max_age_s=1e6, redact=False)
    journal.note(STARTED)
    for seq in range(1, last + 1):
        if journal.wants_snapshot():
            journal.note(SNAPSHOT)
        journal.note(commanded(seq, 8_000))
        if seq == number:
            print(journal.life, flush=True)
        pace.wait(PACE_S)
    sys.stdin.read()
    journal.close("the input has ended", None)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
