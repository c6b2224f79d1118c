# SPDX-License-Identifier: MIT OR Apache-2.0
"""A front's end of the wire: what leaves first. Its life and its end are tested with the client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from metrale_ray.protocol.front.connection import SEND_FRAMES, FrontConnection
from metrale_ray.protocol.front.frames import encode
from metrale_ray.protocol.front.messages import Open, Read
from tests.protocol.front_rig import FRONT_KEYS, HEAD_KEYS


class Socket:
    """Takes `room` frames."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sent: list[bytes] = []

    def send(self, data: bytes, flags: int) -> None:
        assert flags == zmq.NOBLOCK
        if len(self.sent) == self.room:
            raise zmq.Again
        self.sent.append(data)


@pytest.fixture
def connection() -> Iterator[FrontConnection]:
    """One whose thread has not been started."""
    made = FrontConnection(
        "tcp://127.0.0.1:1",
        FRONT_KEYS,
        HEAD_KEYS.public,
        lambda message: None,
        lambda reason: None,
        beat_s=1,
        silence_s=1,
    )
    yield made
    made._wake_in.close()
    made._wake_out.close()
    made._context.destroy(linger=0)


def test_what_was_read_is_said_before_all_that_waits_and_only_the_last_of_it(connection: FrontConnection) -> None:
    first = Socket(1)
    assert connection._flush(first)
    assert first.sent == [encode(Open())]
    connection.send(b"a request")
    connection.note_read(3)
    assert not connection._flush(Socket(0))
    connection.note_read(4)
    second = Socket(10)
    assert connection._flush(second)
    assert second.sent == [encode(Read(4)), b"a request"]
    third = Socket(10)
    assert connection._flush(third)
    assert third.sent == []


def test_very_many_frames_do_not_keep_the_thread_from_reading(connection: FrontConnection) -> None:
    for _ in range(2 * SEND_FRAMES):
        connection.send(b"a request")
    turn = Socket(10 * SEND_FRAMES)
    assert not connection._flush(turn)
    assert len(turn.sent) == SEND_FRAMES
