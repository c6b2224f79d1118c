# SPDX-License-Identifier: MIT OR Apache-2.0
"""`ZmqTransport`: one end of a TCP connection to one peer, a ZeroMQ PAIR socket whose monitor tells when it has gone.

Rules: one socket per peer, so that what the monitor says is about that peer. No reconnection: a connection that
has ended is LinkLost for good. A peer whose process has gone shows at once, one that is stopped when its heartbeat is
overdue. The context is the transport's own, so that closing can wait, within a limit, until what was sent has left.

Both ends know the other's public key and speak to nobody else, encrypted (CURVE). A stranger at the listening end is
dropped before it becomes the socket's one peer, so that it can neither speak nor take the peer's place: one that has
no key at once, and one that says nothing after HANDSHAKE_TIMEOUT_MS. A peer that comes meanwhile is let in, and only
the news of its loss may be late by that time. Of two connections with the right key the first is the peer.

What is left out: a limit on connections. Until it is dropped a stranger holds one descriptor and as much memory as it
sends, up to one frame, for ZeroMQ has no lower bound before the handshake. Whoever can open hundreds of connections in
a few seconds can use these up: who may reach the port is the network's matter.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from metrale_ray.errors import LinkLost, StartError
from metrale_ray.protocol.door import Door
from metrale_ray.protocol.keys import CURVE_FRAME_BYTES, KeyPair, call_with, listen_with, raw_key
from metrale_ray.protocol.limits import MAX_FRAME_BYTES
from metrale_ray.protocol.transport import check_frame_size

HEARTBEAT_INTERVAL_MS = 1000
"""How often each end asks whether the other's process runs."""

HEARTBEAT_TIMEOUT_MS = 3000
"""How long it may take to answer; with the interval, a stopped process shows within 4 s."""

HANDSHAKE_TIMEOUT_MS = 3000
"""How long a connection may take to say who it is; a stray one (a port scan) is dropped then."""

CONNECT_TIMEOUT_MS = 10_000
"""How long the network may take to make a connection, where nobody answers at all."""

NO_RECONNECT_MS = 3_600_000
"""No reconnection: the socket is closed as soon as its connection has ended, long before this. The option's own
"never", and IMMEDIATE too, would throw away what the peer sent last and is still unread."""

SEND_TIMEOUT_S = 5.0
"""How long a send may wait for room or for the peer to come; a peer that takes this long is lost."""

LINGER_MS = 1000
"""How long closing may wait for what was sent to leave: plenty for one reply, short beside every deadline."""

HIGH_WATER_FRAMES = 1000
"""Frames that may wait unread on each side: a load's progress while the head is busy, and a bound on memory."""

WILDCARDS = ("", "*", "0.0.0.0", "::", "[::]")

_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
)
_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ZmqTransport:
    """One end of a connection; made by `listen` or `connect`. See `transport.Transport` for the methods."""

    def __init__(self, peer: str, welcome_key: bytes | None = None) -> None:
        listens = welcome_key is not None
        self._peer = peer
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        _configure(self._socket)
        self._monitor = unbounded_monitor(self._socket, _EVENTS)
        self._watch = ConnectionWatch(peer, listens=listens)
        door = Door(self._context, frozenset({welcome_key}).__contains__) if welcome_key is not None else None
        self._inbox: deque[bytes] = deque()  # what was left to read when the peer had gone
        self._poller = zmq.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)
        # Also when nobody calls close(): a context that is collected before its sockets would wait for them for good.
        self._end = weakref.finalize(self, _close_all, self._context, self._socket, self._monitor, door)
        self._address = ""

    @classmethod
    def listen(cls, host: str, peer: str, keys: KeyPair, peer_key: str) -> ZmqTransport:
        """Wait for `peer`, whose public key is `peer_key`, on a free port of the address `host`, and on no other.
        Raises StartError."""
        if host in WILDCARDS:
            raise StartError(f"the address to listen on is {host!r}; give one address that the other nodes can reach")
        transport = cls(peer, raw_key(peer_key))
        listen_with(transport._socket, keys)
        transport._socket.set(zmq.IPV6, ":" in host)
        try:
            transport._socket.bind(f"tcp://{_bracketed(host)}:*")
        except zmq.ZMQError as error:
            transport.close()
            raise StartError(f"cannot listen on {host!r} for {peer}: {error.strerror}") from error
        transport._address = transport._socket.last_endpoint.decode()
        return transport

    @classmethod
    def connect(cls, address: str, peer: str, keys: KeyPair, peer_key: str) -> ZmqTransport:
        """Connect to `peer`, which listens on `address` (tcp://host:port) and has the public key `peer_key`. Gives the
        transport at once; a connection that fails shows as LinkLost. Raises StartError for an address or a key that is
        none."""
        raw_key(peer_key)
        transport = cls(peer)
        call_with(transport._socket, keys, peer_key)
        transport._socket.set(zmq.IPV6, "[" in address)
        try:
            transport._socket.connect(address)
        except zmq.ZMQError as error:
            transport.close()
            raise StartError(f"cannot connect to {peer} at {address!r}: {error.strerror}") from error
        transport._address = address
        return transport

    @property
    def address(self) -> str:
        """Where the listening end is: tcp://host:port."""
        return self._address

    @property
    def num_refused(self) -> int:
        """Connections of others than the peer that were dropped, as of the last look at the link. From any thread."""
        return self._watch.num_refused

    def send(self, data: bytes) -> None:
        """See Transport. Waits at most SEND_TIMEOUT_S for room, or for a peer that has not come yet."""
        check_frame_size(data)
        deadline = time.monotonic() + SEND_TIMEOUT_S
        while (reason := self.lost()) is None:
            try:
                self._socket.send(data, zmq.NOBLOCK)
            except zmq.Again:
                if not self._wait(zmq.POLLOUT, deadline):
                    raise LinkLost(f"{self._peer} took nothing for {SEND_TIMEOUT_S:g} s") from None
            else:
                return
        raise LinkLost(reason)

    def receive(self, timeout_s: float | None) -> bytes:
        """See Transport. Waits without using the processor; a peer that goes ends the wait at once."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            data = self._take()
            if data is not None:
                return data
            reason = self.lost()
            if self._inbox:
                continue
            if reason is not None:
                raise LinkLost(reason)
            if not self._wait(zmq.POLLIN, deadline):
                raise TimeoutError(f"nothing came from {self._peer} within {timeout_s} s")

    def lost(self) -> str | None:
        """See Transport. Some microseconds."""
        if not self._end.alive:
            return f"the connection to {self._peer} was closed on this side"
        if self._watch.reason is None and self._monitor.get(zmq.EVENTS) & zmq.POLLIN:
            self._read_monitor()
        return self._watch.reason

    def close(self) -> None:
        """See Transport. Waits at most LINGER_MS until what was sent has left."""
        self._inbox.clear()
        self._end()

    def _take(self) -> bytes | None:
        if self._inbox:
            return self._inbox.popleft()
        if not self._end.alive or self._watch.reason is not None:
            return None
        return self._receive_now()

    def _receive_now(self) -> bytes | None:
        try:
            data: bytes = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return data

    def _wait(self, flag: int, deadline: float | None) -> bool:
        """Wait until the socket is ready for `flag` or the monitor has news. False once the deadline has passed."""
        left_ms = None if deadline is None else (deadline - time.monotonic()) * 1000
        if left_ms is not None and left_ms <= 0:
            return False
        self._poller.register(self._socket, flag)
        self._poller.poll(left_ms if left_ms is None else max(1, int(left_ms)))
        return True

    def _read_monitor(self) -> None:
        while self._watch.reason is None:
            try:
                parts = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = parse_monitor_message(parts)
            self._watch.saw(int(message["event"]), int(message["value"]))
        self._keep_the_rest()

    def _keep_the_rest(self) -> None:
        """Read what the peer sent before it went, and close the socket, so that nobody can speak in its place."""
        while (data := self._receive_now()) is not None:
            self._inbox.append(data)
        _close_sockets(self._socket, self._monitor, linger_ms=0)


class ConnectionWatch:
    """What a socket's monitor tells, made into one answer: why the peer has gone, or None.

    A listening socket may be tried by strangers: each connection that ends is one, but the peer's own. Those that come
    after the peer's handshake are no concern of ours, and those that come before it are dropped within its time.
    """

    def __init__(self, peer: str, *, listens: bool) -> None:
        self.reason: str | None = None
        self.num_refused = 0
        self._peer = peer
        self._listens = listens
        self._candidates: set[int] = set()  # connections of which one is the peer's
        self._has_peer = False
        self._detail = ""

    def saw(self, event: int, value: int) -> None:
        """Take in one event of the monitor; `value` is a connection's descriptor or an error number."""
        if event in (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED):
            if not self._has_peer:
                self._candidates.add(value)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._has_peer = True
        elif event in _FAILED_HANDSHAKES:
            self._detail = "the connection was made and the handshake failed"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._detail = "it does not know this process's key, which is of another start or another engine"
        elif event == zmq.EVENT_DISCONNECTED:
            self._disconnected(value)
        elif event == zmq.EVENT_CLOSED and not self._listens and not self._candidates:
            self.reason = f"{self._peer} cannot be reached: the connection was refused or timed out"

    def _disconnected(self, descriptor: int) -> None:
        self._candidates.discard(descriptor)
        if self._listens and (self._candidates or not self._has_peer):
            self.num_refused += 1
        elif self._has_peer:
            self.reason = f"{self._peer} has gone: its connection ended or its heartbeat is overdue"
        else:
            self.reason = f"{self._peer} cannot be reached: {self._detail or 'the connection ended at once'}"


def unbounded_monitor(socket: zmq.Socket[Any], events: int) -> Any:
    """The monitor of `socket`. A full one would hold up all the context's connections, and strangers fill it."""
    monitor = socket.get_monitor_socket(events)
    monitor.set(zmq.RCVHWM, 0)
    return monitor


def _configure(socket: zmq.Socket[Any]) -> None:
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.RECONNECT_IVL, NO_RECONNECT_MS)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + CURVE_FRAME_BYTES)
    socket.set(zmq.SNDHWM, HIGH_WATER_FRAMES)
    socket.set(zmq.RCVHWM, HIGH_WATER_FRAMES)
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.set(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    socket.set(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)


def _close_all(
    context: zmq.Context[Any], socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], door: Door | None
) -> None:
    _close_sockets(socket, monitor, linger_ms=LINGER_MS)
    if door is None:
        context.term()
    else:
        door.end()


def _close_sockets(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], *, linger_ms: int) -> None:
    if not socket.closed:
        socket.disable_monitor()  # first: a socket whose monitor is read by nobody stops for good
        monitor.close(linger=0)
        socket.close(linger=linger_ms)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
