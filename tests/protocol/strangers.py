# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whoever may try a port that is not theirs: each is a context manager that takes an address and the listener's key.

`STRANGERS` are those that are dropped at once, by name; `half_open` says nothing, or only the beginning.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from metrale_ray.protocol.codec import encode_command
from metrale_ray.protocol.commands import Envelope, Settled, Shutdown
from metrale_ray.protocol.front.frames import encode
from metrale_ray.protocol.front.messages import Open
from metrale_ray.protocol.keys import call_with, new_keys
from metrale_ray.protocol.versions import ProtocolVersion

Stranger = Callable[[str, str], Any]

MARKER = Path(os.environ.get("TMPDIR", "/tmp")) / f"metrale-unpickled-{os.getpid()}"
"""The file that whoever unpickles `PICKLE` would make."""

CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""How a peer of the right mechanism begins (ZeroMQ RFC 23)."""


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(MARKER), "w")


PICKLE = pickle.dumps(_Bomb())
COMMAND = encode_command(Envelope(ProtocolVersion.V2, 1, 1, Settled(0, True)), Shutdown())
FRAMES = (PICKLE, COMMAND, encode(Open()), random.Random(7).randbytes(200))  # what a stranger would like to say


@contextmanager
def _socket(address: str, kind: int, prepare: Callable[[zmq.Socket[bytes]], None]) -> Iterator[None]:
    with zmq.Context() as context, context.socket(kind) as stranger:
        stranger.set(zmq.LINGER, 0)
        stranger.set(zmq.RECONNECT_IVL, -1)  # one try, so that it is counted once
        prepare(stranger)
        stranger.connect(address)
        for frame in FRAMES:
            with contextlib.suppress(zmq.Again):  # a connection that was refused takes nothing any more
                stranger.send(frame, zmq.NOBLOCK)
        yield


def without_keys(address: str, key: str) -> Any:
    """A plain socket of a ZeroMQ user."""
    return _socket(address, zmq.PAIR, lambda stranger: None)


def with_a_password(address: str, key: str) -> Any:
    """The PLAIN mechanism."""

    def prepare(stranger: zmq.Socket[bytes]) -> None:
        stranger.set(zmq.PLAIN_USERNAME, b"admin")
        stranger.set(zmq.PLAIN_PASSWORD, b"admin")

    return _socket(address, zmq.DEALER, prepare)


def with_unknown_keys(address: str, key: str) -> Any:
    """A worker or a front of an earlier launch, which may well know the head's key."""
    return _socket(address, zmq.PAIR, lambda stranger: call_with(stranger, new_keys(), key))


def for_another_head(address: str, key: str) -> Any:
    """A peer that looks for a head with another key."""
    return _socket(address, zmq.DEALER, lambda stranger: call_with(stranger, new_keys(), new_keys().public))


@contextmanager
def _connection(address: str, data: bytes) -> Iterator[socket.socket]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        with contextlib.suppress(ConnectionError):  # it may be dropped before all is said
            connection.sendall(data)
        yield connection


def random_bytes(address: str, key: str) -> Any:
    """Noise, which begins as no peer does."""
    return _connection(address, b"\x00" + random.Random(3).randbytes(4096))


def a_web_browser(address: str, key: str) -> Any:
    """The wrong port."""
    return _connection(address, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")


def a_bare_pickle(address: str, key: str) -> Any:
    """What an unsafe server would run."""
    return _connection(address, PICKLE * 4)


def random_bytes_after_the_greeting(address: str, key: str) -> Any:
    """Noise where the handshake should be."""
    return _connection(address, CURVE_GREETING + b"\x04\xc8" + random.Random(5).randbytes(200))


def half_open(address: str, begins: bool = False) -> Any:
    """A connection that says nothing, or goes silent after the greeting."""
    return _connection(address, CURVE_GREETING if begins else b"")


SOCKETS: dict[str, Stranger] = {
    "a socket without keys": without_keys,
    "a socket with a password": with_a_password,
    "a socket with unknown keys": with_unknown_keys,
    "a socket for another head": for_another_head,
    "noise after the greeting": random_bytes_after_the_greeting,
}
"""Those that speak ZeroMQ, at least at the beginning."""

STRANGERS: dict[str, Stranger] = {
    **SOCKETS,
    "random bytes": random_bytes,
    "a web browser": a_web_browser,
    "a bare pickle": a_bare_pickle,
}
