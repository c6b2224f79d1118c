# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Door`: says for every connection to a context's listening sockets whether its key may come in (ZAP, ZeroMQ RFC 27).

Rules: it has a thread of its own, so that a handshake never waits for whoever uses the sockets. It ends with its
context, which it never holds up, in whatever thread that happens. If it breaks, nobody comes in. A stranger is logged
once and counted by whoever listens: nobody outside must be able to fill the log.

What it leaves out: peers of another mechanism than CURVE and those that speak no ZeroMQ at all. The socket itself turns
them away and never asks here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import zmq

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 5.0
"""Far above what the thread needs to see that its context has ended."""

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_ENDED = (zmq.ETERM, zmq.ENOTSOCK)


class Door:
    """The door of `context`, open until `end`. `is_welcome` gets the 32 bytes of a key, and must not wait."""

    def __init__(self, context: zmq.Context[Any], is_welcome: Callable[[bytes], bool]) -> None:
        self._context = context
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP, socket_class=zmq.Socket)
        self._socket.bind(_ADDRESS)
        self._thread = threading.Thread(target=_keep, args=(self._socket, is_welcome), name="door", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the context, whose other sockets are closed, and the thread. From any thread."""
        is_mine = threading.current_thread() is self._thread  # a collection of garbage came to run here
        if is_mine:
            self._socket.close(linger=0)
        self._context.term()
        if not is_mine:
            self._thread.join(JOIN_TIMEOUT_S)


def _keep(socket: zmq.Socket[bytes], is_welcome: Callable[[bytes], bool]) -> None:
    refused_one = False
    try:
        while True:
            question = socket.recv_multipart()
            welcome = _is_let_in(question, is_welcome)
            if not welcome and not refused_one:
                refused_one = True
                log.warning("refused a stranger from %s; later ones are counted only", question[3].decode("ascii"))
            socket.send_multipart(_answer(question, welcome))
    except zmq.ZMQError as error:
        if error.errno not in _ENDED:
            raise
    finally:
        socket.close(linger=0)


def _is_let_in(question: list[bytes], is_welcome: Callable[[bytes], bool]) -> bool:
    _, _, _, _, _, mechanism, *credentials = question
    return mechanism == b"CURVE" and len(credentials) == 1 and is_welcome(credentials[0])


def _answer(question: list[bytes], welcome: bool) -> list[bytes]:
    status, text = (b"200", b"OK") if welcome else (b"400", b"unknown key")
    user_id = question[6].hex().encode("ascii") if welcome else b""
    return [_VERSION, question[1], status, text, user_id, b""]
