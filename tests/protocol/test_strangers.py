# SPDX-License-Identifier: MIT OR Apache-2.0
"""Strangers at the ports of links and fronts: refused, counted, and no trouble to those who belong there."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from metrale_ray.errors import EngineDead, FrameError, LinkLost
from metrale_ray.protocol.codec import decode_command, decode_reply
from metrale_ray.protocol.door import Door
from metrale_ray.protocol.front import server as server_module
from metrale_ray.protocol.front.allowed_keys import UNUSED_S, AllowedKeys
from metrale_ray.protocol.front.client import FrontClient
from metrale_ray.protocol.front.frames import decode_from_front, decode_from_head
from metrale_ray.protocol.front.messages import Output
from metrale_ray.protocol.keys import KeyPair, call_with, listen_with, new_keys, raw_key
from metrale_ray.protocol.zmq_transport import ZmqTransport
from metrale_ray.sampling.params import SamplingParams
from tests.protocol import front_rig
from tests.protocol.front_rig import OPENED, WAIT_S, Rig, front_client, raw_front, running
from tests.protocol.strangers import MARKER, PICKLE, SOCKETS, STRANGERS, Stranger, half_open, with_unknown_keys
from tests.protocol.transport_pairs import HEAD_KEYS, WORKER_KEYS, zmq_pair

HALF_OPEN = 100
SHORT_MS = 300  # a handshake's time, in the tests that wait for its end


@pytest.fixture(autouse=True)
def nothing_is_unpickled() -> Iterator[None]:
    yield
    assert not MARKER.exists()


@pytest.fixture
def short_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metrale_ray.protocol.zmq_transport.HANDSHAKE_TIMEOUT_MS", SHORT_MS)
    monkeypatch.setattr("metrale_ray.protocol.front.router.HANDSHAKE_TIMEOUT_MS", SHORT_MS)


def listen() -> ZmqTransport:
    return ZmqTransport.listen("127.0.0.1", "rank 1", HEAD_KEYS, WORKER_KEYS.public)


def connect(link: ZmqTransport) -> ZmqTransport:
    return ZmqTransport.connect(link.address, "the head", WORKER_KEYS, HEAD_KEYS.public)


def echo(link: ZmqTransport, friend: ZmqTransport, times: int = 20) -> None:
    for number in range(times):
        link.send(b"%d" % number)
        assert friend.receive(WAIT_S) == b"%d" % number
        friend.send(b"reply %d" % number)
        assert link.receive(WAIT_S) == b"reply %d" % number


def until(condition: Callable[[], Any], link: ZmqTransport) -> None:
    """Look at the link until the condition holds; nothing may arrive meanwhile."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        with pytest.raises(TimeoutError):
            link.receive(0.02)


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_at_a_link_is_refused_before_beside_and_after_the_peer(name: str) -> None:
    stranger = STRANGERS[name]
    link = listen()
    with stranger(link.address, HEAD_KEYS.public):
        until(lambda: link.num_refused == 1, link)
        friend = connect(link)
        echo(link, friend)
    with stranger(link.address, HEAD_KEYS.public):
        echo(link, friend)
        until(lambda: link.num_refused == 2, link)
        echo(link, friend)
    friend.close()
    with pytest.raises(LinkLost, match="rank 1 has gone"):
        link.receive(WAIT_S)
    with contextlib.suppress(ConnectionError), stranger(link.address, HEAD_KEYS.public), pytest.raises(LinkLost):
        link.receive(0.1)
    link.close()


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_at_the_fronts_port_is_refused_and_a_request_goes_on(name: str) -> None:
    stranger = STRANGERS[name]
    with running() as rig, stranger(rig.server.address, front_rig.HEAD_KEYS.public):
        with front_client(rig.server.address) as client:
            assert client.wait_opened(WAIT_S) == OPENED
            handle = client.submit([1], SamplingParams())
            front_id, submit = rig.next_message()
            for number in range(5):
                with stranger(rig.server.address, front_rig.HEAD_KEYS.public):
                    rig.post(front_id, Output(submit.request_id, 0, (number,)))
                    assert handle.get(WAIT_S).token_ids == (number,)
                    if name in SOCKETS:
                        wait_for_refusals(rig, number + 2)
            assert rig.call(lambda: rig.server.num_fronts) == 1
        assert rig.next_gone() == front_id
        assert rig.messages.empty()


def wait_for_refusals(rig: Rig, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while rig.call(lambda: rig.server.num_refused) < count:
        assert time.monotonic() < deadline


FOREIGN = """
import itertools, sys, zmq
sys.path.insert(0, ".")
from tests.protocol.strangers import FRAMES
context = zmq.Context()
for kind, address in itertools.product((zmq.PAIR, zmq.DEALER, zmq.REQ, zmq.PUSH), sys.argv[1:]):
    stranger = context.socket(kind)
    monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.connect(address)
    for frame in FRAMES:
        try:
            stranger.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            pass
    assert monitor.poll(20_000)
    stranger.close(linger=0)
context.destroy(linger=0)
"""


def test_a_foreign_process_reaches_nobody() -> None:
    link, friend = zmq_pair()
    with running() as rig, raw_front(rig.server.address) as front:
        foreign = subprocess.Popen([sys.executable, "-c", FOREIGN, link.address, rig.server.address])
        while foreign.poll() is None:
            echo(link, friend)
        assert foreign.returncode == 0
        until(lambda: link.num_refused >= 4, link)
        wait_for_refusals(rig, 4)
        assert rig.messages.empty()
        front.say(front_rig.Abort(1))
        assert rig.next_message()[1] == front_rig.Abort(1)
    friend.close()
    link.close()


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.usefixtures("short_handshakes")
def test_many_half_open_connections_lock_no_peer_out_and_are_dropped(begins: bool) -> None:
    link = listen()
    with contextlib.ExitStack() as strangers:
        waiting = [strangers.enter_context(half_open(link.address, begins)) for _ in range(HALF_OPEN)]
        friend = connect(link)
        echo(link, friend)
        for connection in waiting:
            hear_the_end(connection)
        echo(link, friend)
        until(lambda: link.num_refused == HALF_OPEN, link)
        waiting = [strangers.enter_context(half_open(link.address, begins)) for _ in range(HALF_OPEN)]
        echo(link, friend)
        friend.close()  # the loss shows at once, though others are still there
        with pytest.raises(LinkLost, match="rank 1 has gone"):
            link.receive(WAIT_S)
    link.close()


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.usefixtures("short_handshakes")
def test_many_half_open_connections_at_the_fronts_port_are_dropped(begins: bool) -> None:
    with running() as rig, contextlib.ExitStack() as strangers:
        waiting = [strangers.enter_context(half_open(rig.server.address, begins)) for _ in range(HALF_OPEN)]
        with raw_front(rig.server.address) as front:
            for connection in waiting:
                hear_the_end(connection)
            front.say(front_rig.Abort(1))
            assert rig.next_message()[1] == front_rig.Abort(1)
        wait_for_refusals(rig, HALF_OPEN)


def hear_the_end(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass


def test_strangers_that_nobody_looks_at_hold_up_no_traffic() -> None:
    link, friend = zmq_pair()
    echo(link, friend)
    count = 1200  # two pieces of news each: more than a monitor holds by default
    for _ in range(count):
        with half_open(link.address):
            pass
    for number in range(20):  # without a look at the monitor
        friend.send(b"%d" % number)
        assert link._socket.poll(WAIT_S * 1000)
        assert link._socket.recv() == b"%d" % number
    until(lambda: link.num_refused == count, link)
    friend.close()
    link.close()


class Wire:
    """A man in the middle of one connection, who keeps what the calling side says."""

    def __init__(self, address: str) -> None:
        self.heard = b""
        self._there = endpoint(address)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self) -> None:
        caller, _ = self._server.accept()
        with caller, socket.create_connection(self._there) as listener:
            back = threading.Thread(target=self._copy, args=(listener, caller, False))
            back.start()
            self._copy(caller, listener, True)
            back.join()

    def _copy(self, source: socket.socket, target: socket.socket, keeps: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.heard += data if keeps else b""
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._thread.join(WAIT_S)
        self._server.close()


def endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def test_what_was_heard_on_the_wire_is_no_plain_text_and_opens_nothing_when_it_is_said_again() -> None:
    first = listen()
    wire = Wire(first.address)
    friend = ZmqTransport.connect(wire.address, "the head", WORKER_KEYS, HEAD_KEYS.public)
    friend.send(b"a secret prompt")
    assert first.receive(WAIT_S) == b"a secret prompt"
    friend.close()
    first.close()
    wire.close()
    assert b"CURVE" in wire.heard
    assert b"secret" not in wire.heard
    second = listen()
    with socket.create_connection(endpoint(second.address), timeout=WAIT_S) as replay:
        replay.sendall(wire.heard)
        hear_the_end(replay)
    until(lambda: second.num_refused == 1, second)
    friend = connect(second)
    echo(second, friend)
    friend.close()
    second.close()


def test_a_handshake_needs_nobody_at_the_listening_end() -> None:
    link = listen()
    with zmq.Context() as context, context.socket(zmq.PAIR) as raw:
        raw.set(zmq.LINGER, 0)
        call_with(raw, WORKER_KEYS, HEAD_KEYS.public)
        monitor = raw.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        raw.connect(link.address)
        assert monitor.poll(WAIT_S * 1000)
        assert recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        raw.disable_monitor()
        monitor.close()
    link.close()


def test_another_ranks_key_and_an_earlier_launchs_are_told_that_they_are_unknown() -> None:
    link = listen()
    other = ZmqTransport.connect(link.address, "the head", new_keys(), HEAD_KEYS.public)
    other.send(b"let me in")
    with pytest.raises(LinkLost, match="the head cannot be reached: it does not know this process's key"):
        other.receive(WAIT_S)
    other.close()
    until(lambda: link.num_refused == 1, link)
    link.close()


def say(worker: ZmqTransport, data: bytes) -> None:
    worker.send(data)
    worker.receive(WAIT_S)


@contextlib.contextmanager
def false_head(kind: int, *, secured: bool = True) -> Iterator[tuple[str, zmq.Socket[bytes]]]:
    """A second head, which takes everybody and has not the key that its callers were told."""
    context = zmq.Context()
    door = Door(context, lambda key: True)
    listener = context.socket(kind)
    if secured:
        listen_with(listener, new_keys())
    port = listener.bind_to_random_port("tcp://127.0.0.1")
    try:
        yield f"tcp://127.0.0.1:{port}", listener
    finally:
        listener.close(linger=0)
        door.end()


@pytest.mark.parametrize("secured", [True, False])
def test_a_worker_says_nothing_to_a_head_that_is_not_its_own(secured: bool) -> None:
    with false_head(zmq.PAIR, secured=secured) as (address, listener):
        worker = ZmqTransport.connect(address, "the head", WORKER_KEYS, HEAD_KEYS.public)
        with pytest.raises(LinkLost, match="the head cannot be reached"):
            say(worker, b"hello")
        worker.close()
        assert not listener.poll(0)


@pytest.mark.parametrize("secured", [True, False])
def test_a_front_says_nothing_to_a_head_that_is_not_its_own(secured: bool) -> None:
    with false_head(zmq.ROUTER, secured=secured) as (address, listener):
        with front_client(address) as client, pytest.raises(EngineDead, match="was lost"):
            client.wait_opened(WAIT_S)
        assert not listener.poll(0)


def test_a_front_that_is_allowed_later_comes_in_and_one_that_is_disallowed_leaves() -> None:
    keys = new_keys()
    with running() as rig:
        be_refused(rig, keys)
        rig.call(rig.server.allow, keys.public)
        with (
            raw_front(rig.server.address) as other,
            FrontClient(rig.server.address, keys, front_rig.HEAD_KEYS.public) as client,
        ):
            assert client.wait_opened(WAIT_S) == OPENED
            handle = client.submit([1], SamplingParams())
            front_id, _ = rig.next_message()
            rig.call(rig.server.disallow, keys.public)
            with pytest.raises(EngineDead, match="its key is not allowed any more"):
                handle.get(WAIT_S)
            assert rig.next_gone() == front_id
            other.say(front_rig.Abort(1))
            assert rig.next_message()[1] == front_rig.Abort(1)
        be_refused(rig, keys)


def test_a_fronts_key_is_forgotten_some_time_after_its_session_and_the_drivers_own_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, now_s = new_keys(), [0.0]
    rule = AllowedKeys(clock=lambda: now_s[0])
    monkeypatch.setattr(server_module, "AllowedKeys", lambda **_: rule)
    with running() as rig:
        rig.call(partial(rig.server.allow, front_rig.FRONT_KEYS.public, is_lasting=True))
        rig.call(rig.server.allow, keys.public)
        with FrontClient(rig.server.address, keys, front_rig.HEAD_KEYS.public) as client:
            client.wait_opened(WAIT_S)
            now_s[0] = UNUSED_S * 2
            assert rule.is_allowed(raw_key(keys.public))
        rig.next_gone()
        now_s[0] = UNUSED_S * 4
        be_refused(rig, keys)
        with raw_front(rig.server.address):
            assert rig.call(lambda: rig.server.num_fronts) == 1


def be_refused(rig: Rig, keys: KeyPair) -> None:
    with (
        FrontClient(rig.server.address, keys, front_rig.HEAD_KEYS.public) as client,
        pytest.raises(EngineDead, match="handshake_failed_auth"),
    ):
        client.wait_opened(WAIT_S)


def test_a_front_that_was_let_in_and_disallowed_before_it_opened_gets_no_session() -> None:
    with running() as rig, raw_front(rig.server.address, opens=False) as front:
        front.say(front_rig.Abort(1))  # so that the connection is there: refused for want of an Open
        assert "first message must be Open" in front.hear().reason
        rig.call(rig.server.disallow, front_rig.FRONT_KEYS.public)
        front.say(front_rig.Open())
        assert "key is not allowed any more" in front.hear().reason
        assert rig.call(lambda: rig.server.num_fronts) == 0


@pytest.mark.parametrize("decode", [decode_command, decode_reply, decode_from_front, decode_from_head])
def test_a_pickle_from_a_peer_with_the_right_key_is_a_bad_frame(decode: Callable[[bytes], Any]) -> None:
    link, friend = zmq_pair()
    friend.send(PICKLE)
    with pytest.raises(FrameError):
        decode(link.receive(WAIT_S))
    friend.close()
    link.close()


@pytest.mark.parametrize("stranger", [None, with_unknown_keys])
def test_many_rounds_of_opening_and_closing_leave_no_thread_and_no_descriptor(stranger: Stranger | None) -> None:
    def round_trip() -> None:
        link, friend = zmq_pair()
        with running() as rig, front_client(rig.server.address) as client:
            client.wait_opened(WAIT_S)
            if stranger is not None:
                with stranger(link.address, HEAD_KEYS.public), stranger(rig.server.address, HEAD_KEYS.public):
                    echo(link, friend, 1)
                    until(lambda: link.num_refused == 1, link)
        friend.close()
        link.close()

    round_trip()
    gc.collect()
    before = held()
    for _ in range(20):
        round_trip()
    assert held() == before


def test_a_close_with_half_open_connections_and_handshakes_under_way_is_quick() -> None:
    link = listen()
    with contextlib.ExitStack() as strangers:
        for begins in (False, True) * 10:
            strangers.enter_context(half_open(link.address, begins))
        friends = [connect(link) for _ in range(5)]
        start = time.monotonic()
        link.close()
        assert time.monotonic() - start < 2
        for friend in friends:
            friend.close()


def held() -> tuple[int, int, int]:
    """Descriptors, the interpreter's threads, and the system's threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task"))
