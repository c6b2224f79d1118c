# SPDX-License-Identifier: MIT OR Apache-2.0
"""The door lets the listed keys in, ends with its context in any thread, and opens to nobody once it is broken."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from metrale_ray.protocol.door import Door
from metrale_ray.protocol.keys import KeyPair, call_with, listen_with, new_keys, raw_key

KEYS, GUEST, STRANGER = new_keys(), new_keys(), new_keys()
WAIT_MS = 20_000
OUTCOMES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class House:
    """A listening socket with a door, or without one."""

    def __init__(self, is_welcome: Callable[[bytes], bool] | None) -> None:
        self.context = zmq.Context()
        self.door = None if is_welcome is None else Door(self.context, is_welcome)
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.set(zmq.HANDSHAKE_IVL, 200)
        listen_with(self.socket, KEYS)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    def end(self) -> None:
        self.socket.close(linger=0)
        if self.door is None:
            self.context.term()
        else:
            self.door.end()


@contextmanager
def house(is_welcome: Callable[[bytes], bool] | None) -> Iterator[House]:
    made = House(is_welcome)
    yield made
    made.end()


def outcome(made: House, keys: KeyPair) -> int:
    """How the handshake of a caller with `keys` ends, as the caller sees it."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as caller:
        caller.set(zmq.LINGER, 0)
        call_with(caller, keys, KEYS.public)
        with caller.get_monitor_socket(OUTCOMES) as monitor:
            caller.connect(f"tcp://127.0.0.1:{made.port}")
            assert monitor.poll(WAIT_MS)
            event = int(recv_monitor_message(monitor)["event"])
            caller.disable_monitor()
    return event


def test_only_the_listed_key_comes_in_and_the_list_may_change() -> None:
    listed = {raw_key(GUEST.public)}
    with house(listed.__contains__) as made:
        assert outcome(made, GUEST) == zmq.EVENT_HANDSHAKE_SUCCEEDED
        assert outcome(made, STRANGER) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        listed.add(raw_key(STRANGER.public))
        assert outcome(made, STRANGER) == zmq.EVENT_HANDSHAKE_SUCCEEDED
        listed.remove(raw_key(GUEST.public))
        assert outcome(made, GUEST) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        assert made.door is not None
        assert made.door.num_refused == 2


def test_strangers_fill_no_log_and_no_secret_gets_into_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with house(lambda key: False) as made:
        for _ in range(5):
            assert outcome(made, STRANGER) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert [record.getMessage() for record in caplog.records] == [
        "refused a stranger from 127.0.0.1; later ones are only counted"
    ]


def test_without_a_door_nobody_comes_in() -> None:
    with house(None) as made:
        assert outcome(made, GUEST) != zmq.EVENT_HANDSHAKE_SUCCEEDED


def test_a_door_that_ended_while_a_handshake_waits_lets_nobody_in() -> None:
    def end_from_within(key: bytes) -> bool:
        """As a collection of garbage may do that runs in the door's own thread."""
        made.socket.close(linger=0)
        assert made.door is not None
        made.door.end()
        ended.set()
        return True

    ended = threading.Event()
    made = House(end_from_within)
    assert outcome(made, GUEST) != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert ended.wait(WAIT_MS / 1000)
    assert made.context.closed
    assert made.door is not None
    made.door._thread.join(WAIT_MS / 1000)
    assert not made.door._thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_door_lets_nobody_in_and_still_ends() -> None:
    def break_down(key: bytes) -> bool:
        raise ValueError("broken")

    with house(break_down) as made:
        assert outcome(made, GUEST) != zmq.EVENT_HANDSHAKE_SUCCEEDED
        assert outcome(made, GUEST) != zmq.EVENT_HANDSHAKE_SUCCEEDED
