# SPDX-License-Identifier: MIT OR Apache-2.0
"""Pieces read by several threads."""

from __future__ import annotations

import threading

import pytest

from metrale_ray.errors import CheckpointError
from metrale_ray.model.parallel_reading import read_pieces
from metrale_ray.model.tensor_reader import TensorReader


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_each_piece_is_read_once_and_told_of_in_the_callers_thread(num_threads: int) -> None:
    read: list[int] = []
    told: list[int] = []
    threads: set[int] = set()

    def note(piece: int) -> None:
        told.append(piece)
        threads.add(threading.get_ident())

    read_pieces(range(100), lambda reader, piece: read.append(piece), note, num_threads)
    assert sorted(read) == sorted(told) == list(range(100))
    assert threads == {threading.get_ident()}


def test_threads_do_not_share_a_reader() -> None:
    users: dict[int, set[int]] = {}
    kept: list[TensorReader] = []

    def read(reader: TensorReader, piece: int) -> None:
        kept.append(reader)
        users.setdefault(id(reader), set()).add(threading.get_ident())

    read_pieces(range(50), read, lambda piece: None, 3)
    assert all(len(threads) == 1 for threads in users.values())


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_first_error_ends_it(num_threads: int) -> None:
    read: list[int] = []

    def fail(reader: TensorReader, piece: int) -> None:
        read.append(piece)
        if piece == 7:
            raise CheckpointError("the seventh is broken")

    with pytest.raises(CheckpointError, match="seventh"):
        read_pieces(range(1000), fail, lambda piece: None, num_threads)
    assert len(read) < 100
