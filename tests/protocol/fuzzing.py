# SPDX-License-Identifier: MIT OR Apache-2.0
"""Running very many frames through one reader: everything is counted, and a failure names the seed and the frame.

A reader gets one frame and gives a name for the message that it found, or raises one of the errors it is allowed.
Time is the thread's own processor time, so that a busy machine cannot fail a test.
"""

from __future__ import annotations

import gc
import os
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from metrale_ray.errors import FrameError, LinkLost, MetraleError

NUM_FRAMES = 100_000
"""Frames per side in every run."""

MAX_FRAME_S = 2.0
"""Processor time for one frame, whatever it is: some hundred times what the longest takes."""

MAX_MESSAGE_CHARS = 8192
"""An error goes to logs and over the wire; it may quote a name of 256 characters, each escaped to ten."""

MAX_GROWTH_BYTES = 48 * 2**20
"""What a process may have grown by after all frames: free lists and arenas, and nothing per frame."""

Reader = Callable[[bytes], str]


class Tally:
    """What came of the frames: how many there were, messages by name, refusals by the type of the error."""

    def __init__(self) -> None:
        self.num_frames = 0
        self.messages: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    @property
    def num_messages(self) -> int:
        """Frames that were valid."""
        return self.messages.total()


def run_frames(
    side: str,
    seed: int,
    frames: Iterator[bytes],
    read: Reader,
    allowed: tuple[type[MetraleError], ...],
    rank: int | None = None,
    tally: Tally | None = None,
) -> Tally:
    """Give every frame to `read`. Any error that is not `allowed` goes on, with a note that names the frame.

    A FrameError, itself or as the cause of LinkLost, must say how many bytes came, and from which rank.
    A `tally` that is given goes on.
    """
    tally = tally or Tally()
    for data in frames:
        tally.num_frames += 1
        started = time.thread_time()
        try:
            try:
                tally.messages[read(data)] += 1
            except allowed as error:
                _check_refusal(error, data, rank)
                tally.refusals[type(error).__name__] += 1
            if time.thread_time() - started > MAX_FRAME_S:
                raise AssertionError(f"the frame took {time.thread_time() - started:g} s")
        except BaseException as error:
            error.add_note(f"{side}: frame {tally.num_frames} of seed {seed}, {len(data)} bytes: {data.hex()}")
            raise
    return tally


def _check_refusal(error: MetraleError, data: bytes, rank: int | None) -> None:
    if len(str(error)) > MAX_MESSAGE_CHARS:
        raise AssertionError(f"the error has {len(str(error))} characters") from error
    if isinstance(error, LinkLost):
        if error.rank != rank:
            raise AssertionError(f"rank {error.rank} is lost instead of rank {rank}") from error
        if not isinstance(error.__cause__, FrameError):
            raise AssertionError("the rank is lost for another reason than its bytes") from error
        error = error.__cause__
    if isinstance(error, FrameError) and (error.rank, error.num_bytes) != (rank, len(data)):
        raise AssertionError("the error does not name the rank and the number of bytes") from error


@contextmanager
def steady_memory() -> Iterator[None]:
    """Fail when the process is larger afterwards than its frames can explain."""
    gc.collect()
    before = _resident_bytes()
    yield
    gc.collect()
    growth = _resident_bytes() - before
    if growth > MAX_GROWTH_BYTES:
        raise AssertionError(f"the process grew by {growth} bytes")


def peak_bytes(work: Callable[[], object]) -> int:
    """The most memory that Python held at one time while `work` ran, above what it held before."""
    gc.collect()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
