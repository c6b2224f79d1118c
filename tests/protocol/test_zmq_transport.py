# SPDX-License-Identifier: MIT OR Apache-2.0
"""The TCP transport with real processes that die, stop, never come or talk nonsense."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Iterator

import pytest
import zmq

from metrale_ray.errors import LinkLost, StartError
from metrale_ray.protocol.keys import call_with
from metrale_ray.protocol.limits import MAX_FRAME_BYTES
from metrale_ray.protocol.zmq_transport import ConnectionWatch, ZmqTransport
from tests.protocol.transport_pairs import HEAD_KEYS, WORKER_KEYS

PEER = """
import sys
from metrale_ray.protocol.keys import KeyPair
from metrale_ray.protocol.zmq_transport import ZmqTransport
link = ZmqTransport.connect(sys.argv[1], "the head", KeyPair(*sys.argv[2:4]), sys.argv[4])
link.send(b"here")
while (data := link.receive(None)) != b"leave":
    link.send(data)
link.send(b"last words")
link.close()
"""


def listen(host: str = "127.0.0.1") -> ZmqTransport:
    return ZmqTransport.listen(host, "rank 1", HEAD_KEYS, WORKER_KEYS.public)


def connect(address: str) -> ZmqTransport:
    return ZmqTransport.connect(address, "the head", WORKER_KEYS, HEAD_KEYS.public)


class Peer:
    """A process at the other end of a listening transport."""

    def __init__(self) -> None:
        self.link = listen()
        keys = (WORKER_KEYS.public, WORKER_KEYS.secret, HEAD_KEYS.public)
        self.process = subprocess.Popen([sys.executable, "-c", PEER, self.link.address, *keys])

    def end(self) -> None:
        self.link.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    try:
        assert peer.link.receive(60) == b"here"
        yield peer
    finally:
        peer.end()


def send_without_end(link: ZmqTransport) -> None:
    while True:
        link.send(bytes(2**20))


def seconds_until_lost(link: ZmqTransport) -> tuple[float, str]:
    start = time.monotonic()
    with pytest.raises(LinkLost) as caught:
        link.receive(30)
    return time.monotonic() - start, caught.value.message


def test_a_killed_process_is_noticed_within_a_second(peer: Peer) -> None:
    peer.process.kill()
    seconds, message = seconds_until_lost(peer.link)
    assert seconds < 1
    assert message.startswith("rank 1 has gone")
    assert peer.link.lost() == message


def test_a_killed_process_ends_a_wait_without_limit(peer: Peer) -> None:
    killer = threading.Timer(0.2, peer.process.kill)
    killer.start()
    with pytest.raises(LinkLost, match="rank 1 has gone"):
        peer.link.receive(None)
    killer.join()


def test_a_stopped_process_is_noticed_within_five_seconds(peer: Peer) -> None:
    peer.process.send_signal(signal.SIGSTOP)
    seconds, message = seconds_until_lost(peer.link)
    assert seconds < 5
    assert "heartbeat" in message


def test_a_loss_shows_without_receiving(peer: Peer) -> None:
    assert peer.link.lost() is None
    peer.process.kill()
    peer.process.wait()
    deadline = time.monotonic() + 1
    while peer.link.lost() is None:
        assert time.monotonic() < deadline
    with pytest.raises(LinkLost, match="rank 1 has gone"):
        peer.link.send(b"x")


def test_the_last_words_of_a_process_that_ends_are_read(peer: Peer) -> None:
    peer.link.send(b"leave")
    assert peer.process.wait(30) == 0
    assert peer.link.receive(10) == b"last words"
    with pytest.raises(LinkLost):
        peer.link.receive(10)


def test_a_wait_uses_no_processor_time(peer: Peer) -> None:
    before = time.process_time()
    with pytest.raises(TimeoutError):
        peer.link.receive(1.0)
    assert time.process_time() - before < 0.05


def test_asking_whether_the_peer_is_lost_costs_microseconds(peer: Peer) -> None:
    seconds = min(timeit.repeat(peer.link.lost, number=1000, repeat=5)) / 1000
    assert seconds < 50e-6


def test_a_peer_that_has_not_come_is_no_loss_but_a_timeout() -> None:
    link = listen()
    with pytest.raises(TimeoutError, match="nothing came from rank 1"):
        link.receive(0.1)
    assert link.lost() is None
    link.close()


def test_sending_to_a_peer_that_never_comes_ends_in_link_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metrale_ray.protocol.zmq_transport.SEND_TIMEOUT_S", 0.1)
    link = listen()
    with pytest.raises(LinkLost, match=r"rank 1 took nothing for 0\.1 s"):
        link.send(b"x")
    link.close()


def test_a_stopped_peer_does_not_hold_up_a_sender_for_long(peer: Peer) -> None:
    peer.process.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(LinkLost):
        send_without_end(peer.link)
    assert time.monotonic() - start < 10


def test_a_refused_connection_is_link_lost_with_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    link = connect(f"tcp://127.0.0.1:{port}")
    with pytest.raises(LinkLost, match="the head cannot be reached"):
        link.receive(None)
    with pytest.raises(LinkLost, match="the head cannot be reached"):
        link.send(b"x")
    link.close()


def test_a_server_of_another_kind_is_link_lost_when_it_hangs_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with pytest.raises(LinkLost, match="the head "):
            link.receive(20)
        link.close()


def test_a_server_that_says_nothing_is_link_lost_after_the_handshakes_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        connection, _ = server.accept()
        with connection, pytest.raises(LinkLost, match=r"the head cannot be reached: .* handshake failed"):
            link.receive(20)
        link.close()


def test_a_transport_that_nobody_closed_is_collected_without_waiting() -> None:
    link = listen()
    address = link.address
    cycle = [link]
    cycle.append(cycle)  # type: ignore[arg-type]
    del link, cycle
    gc.collect()
    friend = connect(address)
    with pytest.raises(LinkLost, match="cannot be reached"):
        friend.receive(10)
    friend.close()


def test_strangers_before_and_after_the_peer_do_not_count_as_the_peer() -> None:
    link = listen()
    host, port = "127.0.0.1", int(link.address.rpartition(":")[2])
    with socket.create_connection((host, port)) as scan:
        scan.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(TimeoutError):
        link.receive(0.2)
    friend = connect(link.address)
    friend.send(b"hello")
    assert link.receive(10) == b"hello"
    with socket.create_connection((host, port)) as scan:
        scan.sendall(b"GET / HTTP/1.1\r\n\r\n")
    second = connect(link.address)
    with pytest.raises(TimeoutError):
        link.receive(0.2)
    assert link.lost() is None
    friend.close()
    with pytest.raises(LinkLost, match="rank 1 has gone"):
        link.receive(10)
    second.close()
    link.close()


def test_nobody_takes_the_place_of_a_peer_that_has_gone() -> None:
    link = listen()
    first = connect(link.address)
    first.send(b"first")
    assert link.receive(10) == b"first"
    first.close()
    with pytest.raises(LinkLost):
        link.receive(10)
    second = connect(link.address)
    with pytest.raises(LinkLost):
        link.receive(0.2)
    second.close()
    link.close()


def test_a_frame_above_the_limit_ends_the_connection() -> None:
    link = listen()
    with zmq.Context() as context, context.socket(zmq.PAIR) as raw:
        raw.set(zmq.LINGER, 0)
        call_with(raw, WORKER_KEYS, HEAD_KEYS.public)
        raw.connect(link.address)
        raw.send(bytes(MAX_FRAME_BYTES + 1))
        with pytest.raises(LinkLost, match="rank 1 has gone"):
            link.receive(10)
    link.close()


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "", "::"])
def test_listening_on_every_address_is_refused(host: str) -> None:
    with pytest.raises(StartError, match="give one address"):
        listen(host)


def test_addresses_that_are_none_are_start_errors() -> None:
    with pytest.raises(StartError, match=r"cannot listen on '203\.0\.113\.7' for rank 1"):
        listen("203.0.113.7")
    with pytest.raises(StartError, match="cannot connect to the head at 'nowhere'"):
        connect("nowhere")


def test_it_listens_on_the_given_address_only() -> None:
    link = listen("127.0.0.2")
    port = int(link.address.rpartition(":")[2])
    assert link.address == f"tcp://127.0.0.2:{port}"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    link.close()


def test_a_peer_among_several_unknown_connections_is_lost_when_the_last_of_them_is() -> None:
    watch = ConnectionWatch("rank 1", listens=True)
    for event, value in [
        (zmq.EVENT_ACCEPTED, 5),
        (zmq.EVENT_ACCEPTED, 6),
        (zmq.EVENT_HANDSHAKE_SUCCEEDED, 0),
        (zmq.EVENT_DISCONNECTED, 6),
        (zmq.EVENT_ACCEPTED, 7),
        (zmq.EVENT_DISCONNECTED, 7),
    ]:
        watch.saw(event, value)
        assert watch.reason is None
    watch.saw(zmq.EVENT_DISCONNECTED, 5)
    assert watch.reason is not None


def test_closing_leaves_no_open_descriptors() -> None:
    def round_trip() -> None:
        link = listen()
        friend = connect(link.address)
        friend.send(b"x")
        link.receive(10)
        friend.close()
        link.close()

    round_trip()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        round_trip()
    assert len(os.listdir("/proc/self/fd")) <= before
