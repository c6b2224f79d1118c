# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reading many pieces of a checkpoint with several threads: one reads from the files while another packs.

Rules: pieces are taken in order, each by one thread with files and buffers of its own; the caller hears of each that is
done, in its own thread. The first error ends it, after the pieces under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import TypeVar

from metrale_ray.model.tensor_reader import TensorReader

Piece = TypeVar("Piece")
PIECES_AHEAD = 4  # of each thread: enough that none waits, few enough that an error is soon the end


def read_pieces(
    pieces: Sequence[Piece],
    read: Callable[[TensorReader, Piece], None],
    on_done: Callable[[Piece], None],
    num_threads: int,
) -> None:
    """`read` each of `pieces`, and tell `on_done` of it. Raises what `read` raises first."""
    if num_threads <= 1:
        with TensorReader() as reader:
            for piece in pieces:
                read(reader, piece)
                on_done(piece)
        return
    with ExitStack() as readers, ThreadPoolExecutor(num_threads, "load") as threads:
        own = threading.local()
        opening = threading.Lock()

        def work(piece: Piece) -> Piece:
            if not hasattr(own, "reader"):
                with opening:
                    own.reader = readers.enter_context(TensorReader())
            read(own.reader, piece)
            return piece

        _run_all(threads, work, pieces, on_done, PIECES_AHEAD * num_threads)


def _run_all(
    threads: ThreadPoolExecutor,
    work: Callable[[Piece], Piece],
    pieces: Sequence[Piece],
    on_done: Callable[[Piece], None],
    num_ahead: int,
) -> None:
    remaining = iter(pieces)
    under_way: set[Future[Piece]] = set()
    while True:
        for piece in remaining:
            under_way.add(threads.submit(work, piece))
            if len(under_way) >= num_ahead:
                break
        if not under_way:
            return
        done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
        for future in done:
            on_done(future.result())
