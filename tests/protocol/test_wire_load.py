# SPDX-License-Identifier: MIT OR Apache-2.0
"""Slow and half-dead peers over real sockets: a rank is lost within its deadline and named, a front delays nobody."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from metrale_ray.errors import LinkLost
from metrale_ray.protocol.commands import Load, Ping, PrefillChunk, Rank, Reply, ReplyError, Status, Welcome
from metrale_ray.protocol.front.frames import encode
from metrale_ray.protocol.front.messages import Abort, Beat, Bye, Dead, Open, Output, Outputs, Read
from metrale_ray.protocol.front.server import FrontId
from metrale_ray.protocol.keys import KeyPair
from metrale_ray.protocol.limits import MAX_ERROR_CHARS
from metrale_ray.protocol.link import HeadLink, HeadPort, WorkerLink
from metrale_ray.protocol.session import HeadSession
from metrale_ray.protocol.zmq_transport import ZmqTransport
from tests.protocol.front_rig import OPENED, RawFront, raw_front, running
from tests.protocol.front_samples import FROM_FRONT
from tests.protocol.fuzzing import steady_memory
from tests.protocol.mutations import Mutator
from tests.protocol.samples import hello, row
from tests.protocol.tcp_proxy import WAIT_S, TcpProxy, proxy_to
from tests.protocol.test_session import answer
from tests.protocol.transport_pairs import HEAD_KEYS, WORKER_KEYS

RANK = Rank(1)
DEADLINE_S = 0.5
SLACK_S = 3.0  # what a busy machine may add to a deadline


class Ends:
    """The head's link to rank 1 and that worker's, which are joined through a proxy."""

    def __init__(self, piece_bytes: int = 65536) -> None:
        self.listening = ZmqTransport.listen("127.0.0.1", "rank 1", HEAD_KEYS, WORKER_KEYS.public)
        self.proxy = TcpProxy(self.listening.address, piece_bytes)
        self.calling = ZmqTransport.connect(self.proxy.address, "the head", WORKER_KEYS, HEAD_KEYS.public)
        self.head = HeadLink(RANK, self.listening, 2, 1)
        self.worker = WorkerLink(RANK, self.calling, 2)
        self.session = HeadSession(2, 1)
        self.port = HeadPort(self.session, [self.head])

    def opened(self) -> Ends:
        self.worker.hello(hello(2))
        assert self.head.expect_hello(WAIT_S) == hello(2)
        self.head.welcome(Welcome(2, 1, ""))
        self.worker.expect_welcome(WAIT_S)
        return self

    def close(self) -> None:
        self.proxy.close()
        self.head.close()
        self.worker.close()


@contextmanager
def ends(piece_bytes: int = 65536) -> Iterator[Ends]:
    both = Ends(piece_bytes)
    try:
        yield both
    finally:
        both.close()


@contextmanager
def lost_within(seconds: float) -> Iterator[None]:
    """The block ends in the loss of rank 1, in time."""
    start = time.monotonic()
    with pytest.raises(LinkLost, match="rank 1") as caught:
        yield
    assert time.monotonic() - start < seconds + SLACK_S
    assert caught.value.rank == RANK


def long_failure(to: object) -> Reply:
    """An answer of some kilobytes."""
    failed = answer(to, Status.FAILED)  # type: ignore[arg-type]
    return Reply(
        **{**{n: getattr(failed, n) for n in failed.__slots__}, "error": ReplyError("x", "y" * MAX_ERROR_CHARS)}
    )


def test_a_session_whose_bytes_come_one_at_a_time_is_a_session() -> None:
    with ends(piece_bytes=1) as both:
        both.opened()
        for command in (Load(8), PrefillChunk(row(tokens=tuple(range(500)))), Ping()):
            sent = both.port.broadcast(command)
            assert both.worker.receive() == sent
            both.worker.reply(long_failure(sent))
            assert both.head.collect(sent, WAIT_S) == long_failure(sent)
            both.session.settle(False)
    calls = both.proxy.calls  # which nothing passes any more
    assert calls.num_pieces == calls.num_bytes > 3 * MAX_ERROR_CHARS


def test_a_reply_that_is_cut_in_the_middle_loses_the_rank_at_once() -> None:
    with ends() as both:
        both.opened()
        sent = both.port.broadcast(Ping())
        both.worker.receive()
        both.proxy.calls.limit(MAX_ERROR_CHARS // 2, "cut")
        both.worker.reply(long_failure(sent))
        with lost_within(0):
            both.head.collect(sent, WAIT_S)
        assert both.proxy.calls.is_shut.is_set()


def test_a_reply_that_stops_in_the_middle_loses_the_rank_at_the_deadline() -> None:
    with ends() as both:
        both.opened()
        sent = both.port.broadcast(Ping())
        both.worker.receive()
        both.proxy.calls.limit(MAX_ERROR_CHARS // 2, "stall")
        both.worker.reply(long_failure(sent))
        with lost_within(DEADLINE_S):
            both.head.collect(sent, DEADLINE_S)
        assert both.proxy.calls.is_shut.is_set()


def test_a_peer_whose_network_falls_silent_is_lost_long_before_a_long_deadline() -> None:
    with ends() as both:
        both.opened()
        sent = both.port.broadcast(Ping())
        both.worker.reply(answer(both.worker.receive()))
        both.head.collect(sent, WAIT_S)
        both.session.settle(True)
        for gate in (both.proxy.calls, both.proxy.answers):
            gate.limit(1, "stall")
        sent = both.port.broadcast(Ping())
        with lost_within(5):
            both.head.collect(sent, 300)
        with pytest.raises(LinkLost, match="the head has gone"):  # and the worker does not wait for ever
            both.worker.receive()


def test_a_command_that_is_cut_in_the_middle_is_never_seen_by_the_worker() -> None:
    with ends() as both:
        both.opened()
        both.proxy.answers.limit(2000, "cut")
        both.port.broadcast(PrefillChunk(row(tokens=tuple(range(5000)))))
        with pytest.raises(LinkLost, match="the head has gone") as caught:
            both.worker.receive()
        assert caught.value.rank == 0
        with lost_within(0):
            both.head.collect(both.head._frame, WAIT_S)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_bytes", "then"), [(1, "stall"), (64, "cut"), (300, "stall")])
def test_a_peer_that_goes_in_the_middle_of_its_handshake_is_lost_at_the_deadline(num_bytes: int, then: str) -> None:
    with ends() as both:
        both.proxy.calls.limit(num_bytes, then)  # type: ignore[arg-type]
        both.worker.hello(hello(2))
        with lost_within(DEADLINE_S):
            both.head.expect_hello(DEADLINE_S)


def test_the_first_bytes_of_the_peer_said_again_by_a_stranger_change_nothing() -> None:
    with ends() as both:
        both.opened()
        with socket.create_connection(both.proxy.target, WAIT_S) as stranger:
            stranger.sendall(both.proxy.calls.first)
            sent = both.port.broadcast(Ping())
            both.worker.reply(answer(both.worker.receive()))
            assert both.head.collect(sent, WAIT_S) == answer(sent)
            assert both.head.lost() is None


def test_a_worker_that_reads_nothing_is_lost_at_the_deadline() -> None:
    with ends() as both:
        both.opened()
        sent = both.port.broadcast(PrefillChunk(row(tokens=(1,) * 2**20)))  # more than the sockets' buffers hold
        with lost_within(DEADLINE_S):
            both.head.collect(sent, DEADLINE_S)


WORKER = """
import sys
from metrale_ray.protocol.commands import Rank
from metrale_ray.protocol.keys import KeyPair
from metrale_ray.protocol.link import WorkerLink
from metrale_ray.protocol.zmq_transport import ZmqTransport
from tests.protocol.samples import hello
from tests.protocol.test_session import answer
link = WorkerLink(Rank(1), ZmqTransport.connect(sys.argv[1], "the head", KeyPair(*sys.argv[2:4]), sys.argv[4]), 2)
link.hello(hello(2))
link.expect_welcome(60)
while True:
    link.reply(answer(link.receive()))
"""


def test_a_stopped_worker_is_lost_at_the_deadline_of_its_answer() -> None:
    listening = ZmqTransport.listen("127.0.0.1", "rank 1", HEAD_KEYS, WORKER_KEYS.public)
    keys: KeyPair = WORKER_KEYS
    arguments = (listening.address, keys.public, keys.secret, HEAD_KEYS.public)
    process = subprocess.Popen([sys.executable, "-c", WORKER, *arguments])
    head, session = HeadLink(RANK, listening, 2, 1), HeadSession(2, 1)
    try:
        head.expect_hello(60)
        head.welcome(Welcome(2, 1, ""))
        sent = HeadPort(session, [head]).broadcast(Ping())
        assert head.collect(sent, WAIT_S).status is Status.OK
        session.settle(True)
        os.kill(process.pid, signal.SIGSTOP)
        sent = HeadPort(session, [head]).broadcast(Ping())
        with lost_within(DEADLINE_S):
            head.collect(sent, DEADLINE_S)
    finally:
        process.kill()
        process.wait()
        head.close()


NUM_STEPS, CREDIT = 400, 32
MAX_HELD_BYTES = 100 * 500  # less than the outputs of the steps beyond the credit
NO_BEATS = {"beat_s": 500.0, "silence_s": 1000.0}  # between the outputs that are looked at


def outputs(number: int) -> Output:
    """One step's output of a long request."""
    return Output(1, 0, (number,) * 64)


def test_a_front_that_stops_reading_delays_nobody_and_is_dropped() -> None:
    with (
        steady_memory(),
        running(credit=CREDIT, max_held_bytes=MAX_HELD_BYTES, **NO_BEATS) as rig,
        proxy_to(rig.server.address) as proxy,
        raw_front(proxy.address) as stalled,
        raw_front(rig.server.address) as other,
    ):
        stalled.say(Abort(7))
        stalled_id = rig.next_message()[0]
        other.say(Abort(7))
        other_id = rig.next_message()[0]
        proxy.answers.limit(1, "stall")
        for number in range(1, NUM_STEPS + 1):
            rig.post(stalled_id, outputs(number))
            rig.post(other_id, outputs(number))
            assert other.hear() == Outputs(number, (outputs(number),))  # while the stalled one got nothing
            other.say(Read(number))
            other.say(Abort(number))
            assert rig.next_message() == (other_id, Abort(number))  # so the Read before it has arrived
        assert proxy.answers.is_shut.is_set()
        assert rig.next_gone() == stalled_id
        assert rig.gone.empty()
        assert rig.server.num_fronts == 1


def test_a_front_that_reads_one_byte_at_a_time_gets_everything() -> None:
    with (
        running(credit=CREDIT, **NO_BEATS) as rig,
        proxy_to(rig.server.address, piece_bytes=1) as proxy,
        raw_front(proxy.address) as slow,
    ):
        for number in range(1, 2 * CREDIT):
            rig.post(FrontId(1), Output(1, 0, (number,)))
            assert slow.hear() == Outputs(number, (Output(1, 0, (number,)),))
            slow.say(Read(number))
            slow.say(Abort(number))
            assert rig.next_message() == (FrontId(1), Abort(number))
        assert rig.gone.empty()


def test_a_front_that_stalls_in_the_middle_of_a_frame_is_dropped_for_its_silence() -> None:
    with (
        running(beat_s=0.2, silence_s=2.0) as rig,
        proxy_to(rig.server.address) as proxy,
        raw_front(proxy.address) as stalled,
        raw_front(rig.server.address) as other,
    ):
        other.say(Abort(7))
        other_id = rig.next_message()[0]
        proxy.calls.limit(20, "stall")
        stalled.say(Abort(8))
        while rig.gone.empty():
            heard = other.hear()
            assert heard == Beat()  # its own session goes on
            other.say(Beat())
        assert rig.next_gone() != other_id
        other.say(Abort(9))
        assert rig.next_message() == (other_id, Abort(9))  # and half of the Abort before had no effect


def test_a_front_that_says_damaged_frames_without_end_disturbs_nobody() -> None:
    mutator = Mutator(4001, [encode(message) for message in FROM_FRONT])
    with running(**NO_BEATS) as rig, raw_front(rig.server.address) as bad, raw_front(rig.server.address) as good:
        good.say(Abort(1))
        good_id = rig.next_message()[0]
        for number in range(1, 41):
            for _ in range(25):
                bad.say_bytes(mutator.next())
                bad.say(Open())
            drain(bad, number)
            rig.post(good_id, Output(1, 0, (number,)))
            assert good.hear() == Outputs(number, (Output(1, 0, (number,)),))
            good.say(Read(number))
        assert rig.server.num_refused > 500
        good.say(Abort(2**40))
        while (last := rig.next_message()) != (good_id, Abort(2**40)):
            assert last[0] != good_id  # what the bad front said that was legal
        assert rig.server.num_fronts == 2


def drain(front: RawFront, number: int) -> None:
    """End what session there is, read all that the head has answered, and open the next one."""
    front.say(Bye())
    front.say(Open(1000 + number))
    front.say(Open())
    heard = front.hear()
    while not (isinstance(heard, Dead) and f"speaks version {1000 + number};" in heard.reason):
        heard = front.hear()
    assert front.hear() == OPENED
