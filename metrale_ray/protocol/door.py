# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Door`: says for every connection to a context's listening sockets whether its key may come in (ZAP, ZeroMQ RFC 27).

Rules: it has a thread of its own, so that a handshake never waits for whoever uses the sockets. It ends with its
context, which it never holds up, in whatever thread that happens. If it breaks, nobody comes in. Only the first
stranger is logged, the others are counted: nobody outside must be able to fill the log.

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
        self.num_refused = 0
        """Connections that were turned away here."""
        self._context = context
        self._is_welcome = is_welcome
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP, socket_class=zmq.Socket)
        self._socket.bind(_ADDRESS)
        self._thread = threading.Thread(target=self._keep, name="door", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the context, whose other sockets are closed, and the thread. From any thread."""
        is_mine = threading.current_thread() is self._thread  # a collection of garbage came to run here
        if is_mine:
            self._socket.close(linger=0)
        self._context.term()
        if not is_mine:
            self._thread.join(JOIN_TIMEOUT_S)

    def _keep(self) -> None:
        try:
            while True:
                question = self._socket.recv_multipart()
                welcome = self._is_let_in(question)
                self._socket.send_multipart(_answer(question, welcome))
        except zmq.ZMQError as error:
            if error.errno not in _ENDED:
                raise
        finally:
            self._socket.close(linger=0)

    def _is_let_in(self, question: list[bytes]) -> bool:
        _, _, _, address, _, mechanism, *credentials = question
        if mechanism == b"CURVE" and len(credentials) == 1 and self._is_welcome(credentials[0]):
            return True
        self.num_refused += 1
        if self.num_refused == 1:
            log.warning("refused a stranger from %s; later ones are only counted", address.decode("ascii", "replace"))
        return False


def _answer(question: list[bytes], welcome: bool) -> list[bytes]:
    status, text = (b"200", b"OK") if welcome else (b"400", b"unknown key")
    user_id = question[6].hex().encode("ascii") if welcome else b""
    return [_VERSION, question[1], status, text, user_id, b""]
