# SPDX-License-Identifier: MIT OR Apache-2.0
"""`TcpProxy`: stands between two ends of a connection and forwards their bytes as badly as a test wants.

Each direction has a gate: pieces of any size, and after so many bytes a stall (the connection stays open and nothing
more comes) or a cut. The first bytes of each caller are kept, so that they can be said again by a stranger.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

WAIT_S = 20.0
KEPT_BYTES = 4096


class Gate:
    """One direction of all the proxy's connections."""

    def __init__(self, piece_bytes: int) -> None:
        self.num_bytes = 0
        self.num_pieces = 0
        self.first = b""
        self.is_shut = threading.Event()  # the limit was reached
        self._piece_bytes = piece_bytes
        self._left: int | None = None
        self._then: Literal["stall", "cut"] = "stall"
        self._lock = threading.Lock()

    def limit(self, num_bytes: int, then: Literal["stall", "cut"]) -> None:
        """Let so many bytes more pass."""
        with self._lock:
            self._left, self._then = num_bytes, then

    def forward(self, data: bytes, sink: socket.socket) -> Literal["stall", "cut"] | None:
        """Send what may pass; what happens to the connection then, if anything."""
        with self._lock:
            allowed = len(data) if self._left is None else min(len(data), self._left)
            self._left = None if self._left is None else self._left - allowed
            then = self._then if self._left == 0 else None
        for start in range(0, allowed, self._piece_bytes):
            piece = data[start : min(start + self._piece_bytes, allowed)]
            sink.sendall(piece)
            self.num_pieces += 1
            self.num_bytes += len(piece)
        self.first += data[: max(0, KEPT_BYTES - len(self.first))]
        if then is not None:
            self.is_shut.set()
        return then


class TcpProxy:
    """Listens on a port of its own for a `target` given as tcp://host:port. `calls` and `answers` are its gates."""

    def __init__(self, target: str, piece_bytes: int = 65536) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self.target = (host, int(port))
        self.calls, self.answers = Gate(piece_bytes), Gate(piece_bytes)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        self._start(self._accept)

    @property
    def address(self) -> str:
        """Where to call, as tcp://host:port."""
        return f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"

    def close(self) -> None:
        """End every connection."""
        self._ended.set()
        for each in (self._listening, *self._sockets):
            _end(each)
        for thread in self._threads:
            thread.join(WAIT_S)

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="proxy", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                caller, _ = self._listening.accept()
            except OSError:  # closed
                return
            called = socket.create_connection(self.target, WAIT_S)
            called.settimeout(None)
            for each in (caller, called):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.append(each)
            self._start(self._pump, caller, called, self.calls)
            self._start(self._pump, called, caller, self.answers)

    def _pump(self, source: socket.socket, sink: socket.socket, gate: Gate) -> None:
        then: Literal["stall", "cut"] | None = None
        with contextlib.suppress(OSError):  # an end has gone: so does the other
            while then is None and (data := source.recv(65536)):
                then = gate.forward(data, sink)
        if then == "stall":
            self._ended.wait()
        for each in (source, sink):
            _end(each)


def _end(each: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected any more
        each.shutdown(socket.SHUT_RDWR)
    each.close()


@contextmanager
def proxy_to(target: str, piece_bytes: int = 65536) -> Iterator[TcpProxy]:
    """A proxy that is closed at the end."""
    proxy = TcpProxy(target, piece_bytes)
    try:
        yield proxy
    finally:
        proxy.close()
