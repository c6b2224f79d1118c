# SPDX-License-Identifier: MIT OR Apache-2.0
"""Links over the memory transport: the handshake, commands and replies, and every way in which they fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from metrale_ray.baton import Baton
from metrale_ray.errors import FrameError, HandshakeError, LinkLost, SessionError
from metrale_ray.protocol.codec import encode_hello, encode_reply, encode_welcome
from metrale_ray.protocol.commands import Decode, Load, Ping, Progress, Rank, Reply, Shutdown, Status, Welcome
from metrale_ray.protocol.link import HeadLink, HeadPort, WorkerLink
from metrale_ray.protocol.session import HeadSession
from metrale_ray.protocol.transport import MemoryTransport, Transport, memory_pair
from tests.protocol.samples import DIGEST, frame, hello, row
from tests.protocol.test_fuzz import UNREADABLE
from tests.protocol.test_session import answer
from tests.protocol.transport_pairs import RUNS, Task


class Pair:
    """A head's and a worker's link in one thread: each reads what the other has already sent."""

    def __init__(self, *, version: int = 2, worker_version: int | None = None) -> None:
        self.head_end, self.worker_end = memory_pair(Baton(), "the head", "rank 1")
        self.head = HeadLink(Rank(1), self.head_end, version, 1)
        self.worker = WorkerLink(Rank(1), self.worker_end, worker_version or version)
        self.session = HeadSession(version, 1)
        self.port = HeadPort(self.session, [self.head])

    def greeted(self) -> Pair:
        self.worker.hello(hello(2))
        assert self.head.expect_hello(0) == hello(2)
        return self

    def open(self) -> Pair:
        self.greeted()
        self.head.welcome(Welcome(2, 1, ""))
        assert self.worker.expect_welcome(0) == Welcome(2, 1, "")
        return self


def progress(to: Any, done: int) -> Reply:
    return dataclasses.replace(answer(to, Status.PROGRESS), progress=Progress(done, 10))


def test_a_command_and_its_reply_cross_the_link_as_they_are() -> None:
    pair = Pair().open()
    sent = pair.port.broadcast(Decode(row(3)))
    assert pair.worker.receive() == sent
    pair.worker.reply(answer(sent))
    assert pair.head.collect(sent, 0) == answer(sent)
    pair.session.settle(True)
    assert pair.port.broadcast(Shutdown()).envelope.seq == 2


def test_every_worker_gets_the_same_bytes() -> None:
    pairs = [Pair().open() for _ in range(3)]
    sent = HeadPort(HeadSession(2, 1), [pair.head for pair in pairs]).broadcast(Ping())
    assert [pair.worker.receive().data for pair in pairs] == [sent.data] * 3


def test_a_broadcast_stops_at_the_first_worker_that_is_lost() -> None:
    pairs = [Pair().open() for _ in range(3)]
    pairs[1].worker.close()
    port = HeadPort(HeadSession(2, 1), [pair.head for pair in pairs])
    with pytest.raises(LinkLost, match="rank 1 has closed") as caught:
        port.broadcast(Ping())
    assert caught.value.rank == 1
    assert pairs[0].worker.receive().command == Ping()
    with pytest.raises(TimeoutError):
        pairs[2].worker_end.receive(0)


def test_a_refused_worker_gets_the_reason_and_no_command() -> None:
    pair = Pair().greeted()
    pair.head.welcome(Welcome(2, 1, "dtype: float32 and bfloat16"))
    pair.head.close()
    with pytest.raises(HandshakeError, match="dtype: float32 and bfloat16"):
        pair.worker.expect_welcome(0)
    with pytest.raises(SessionError, match="not allowed while ended"):
        pair.head.send(frame(2, Ping(), 1))


def test_a_hello_of_another_rank_is_refused() -> None:
    pair = Pair()
    pair.worker_end.send(encode_hello(dataclasses.replace(hello(2), rank=Rank(4))))
    with pytest.raises(SessionError, match="rank 4 said hello on the link of rank 1"):
        pair.head.expect_hello(0)
    with pytest.raises(SessionError, match="another rank or version"):
        pair.worker.hello(dataclasses.replace(hello(2), rank=Rank(4)))


def test_a_worker_of_another_version_can_only_be_refused() -> None:
    pair = Pair(worker_version=1)
    pair.worker.hello(hello(1))
    assert pair.head.expect_hello(0).version == 1
    with pytest.raises(SessionError, match="rank 1 speaks v1 and the head v2"):
        pair.head.welcome(Welcome(2, 1, ""))
    pair.head.welcome(Welcome(2, 1, "protocol version: v2 and v1"))
    with pytest.raises(HandshakeError, match="v2 and v1"):
        pair.worker.expect_welcome(0)


def test_a_welcome_of_another_epoch_than_the_links_is_refused() -> None:
    with pytest.raises(SessionError, match="another version or epoch"):
        Pair().greeted().head.welcome(Welcome(2, 2, ""))


def test_a_head_that_is_silent_or_gone_before_its_welcome_is_lost() -> None:
    pair = Pair().greeted()
    with pytest.raises(LinkLost, match="the head is lost: its welcome did not come within 0 s") as caught:
        pair.worker.expect_welcome(0)
    assert caught.value.rank == 0
    pair.head.close()
    with pytest.raises(LinkLost, match=r"^the head has closed"):  # named once
        pair.worker.expect_welcome(0)


def test_a_worker_that_is_silent_or_gone_before_its_hello_is_lost() -> None:
    pair = Pair()
    with pytest.raises(LinkLost, match="rank 1 is lost: its hello did not come within 0 s") as caught:
        pair.head.expect_hello(0)
    assert caught.value.rank == 1
    pair.worker.close()
    with pytest.raises(LinkLost, match=r"^rank 1 has closed"):
        pair.head.expect_hello(0)


def test_a_worker_without_an_answer_at_the_deadline_is_lost() -> None:
    pair = Pair().open()
    sent = pair.port.broadcast(Ping())
    with pytest.raises(LinkLost, match="its answer to command 1 did not come within 0 s") as caught:
        pair.head.collect(sent, 0)
    assert caught.value.rank == 1


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_worker_that_sends_no_frame_is_lost_and_one_that_gets_none_says_so(name: str) -> None:
    data = UNREADABLE[name]
    pair = Pair().open()
    sent = pair.port.broadcast(Ping())
    pair.worker_end._peer._inbox.append(data)  # type: ignore[union-attr]  # past the sender's own check of the size
    with pytest.raises(LinkLost, match=rf"from rank 1 \({len(data)} bytes\)") as lost:
        pair.head.collect(sent, 0)
    assert lost.value.rank == 1
    other = Pair().open()
    other.head_end._peer._inbox.append(data)  # type: ignore[union-attr]
    with pytest.raises(FrameError) as bad:
        other.worker.receive()
    assert (bad.value.rank, bad.value.num_bytes) == (0, len(data))


@pytest.mark.parametrize("change", [{"epoch": 0}, {"epoch": 2}, {"seq": 2}, {"rank": Rank(2)}, {"version": 1}], ids=str)
def test_a_reply_to_something_else_is_a_session_error(change: dict[str, Any]) -> None:
    pair = Pair().open()
    sent = pair.port.broadcast(Ping())
    pair.worker_end.send(encode_reply(dataclasses.replace(answer(sent), **change)))
    with pytest.raises(SessionError, match="rank 1 answered"):
        pair.head.collect(sent, 0)


def test_a_worker_refuses_a_repeated_command() -> None:
    pair = Pair().open()
    sent = pair.port.broadcast(Ping())
    pair.worker.reply(answer(pair.worker.receive()))
    pair.head_end.send(sent.data)
    with pytest.raises(SessionError, match="command 1 came after command 1"):
        pair.worker.receive()


def test_a_worker_link_notices_a_head_that_has_gone() -> None:
    pair = Pair().open()
    assert pair.worker.lost() is None
    pair.head.close()
    assert pair.worker.lost() == "the head has closed the connection"
    for use in (pair.worker.receive, lambda: pair.worker.expect_welcome(0)):
        with pytest.raises(LinkLost) as caught:
            use()
        assert caught.value.rank == 0


def test_a_head_link_notices_a_worker_that_has_gone() -> None:
    pair = Pair().open()
    assert pair.head.lost() is None
    pair.worker.close()
    assert pair.head.lost() == "rank 1 has closed the connection"


def test_the_progress_of_a_load_is_told_and_is_not_the_answer() -> None:
    pair, told = Pair().open(), list[int]()
    sent = pair.port.broadcast(Load(8))
    for done in (1, 5, 9):
        pair.worker_end.send(encode_reply(progress(sent, done)))
    pair.worker_end.send(encode_reply(answer(sent)))
    assert pair.head.collect(sent, 0, lambda p: told.append(p.done_bytes)) == answer(sent)
    assert told == [1, 5, 9]


def test_progress_can_be_read_without_waiting_and_the_answer_is_kept() -> None:
    pair, told = Pair().open(), list[int]()

    def note(p: Progress) -> None:
        told.append(p.done_bytes)

    sent = pair.port.broadcast(Load(8))
    pair.worker.receive()
    assert pair.head.poll_progress(note) is None
    pair.worker.reply(progress(sent, 1))
    pair.worker.reply(progress(sent, 2))
    assert pair.head.poll_progress(note) is None
    pair.worker.reply(progress(sent, 3))
    pair.worker.reply(answer(sent))
    assert pair.head.poll_progress(note) == answer(sent)
    assert pair.head.poll_progress(note) == answer(sent)
    assert pair.head.collect(sent, 0) == answer(sent)
    assert told == [1, 2, 3]


def test_a_worker_that_goes_during_a_load_is_noticed_between_two_looks() -> None:
    pair = Pair().open()
    pair.port.broadcast(Load(8))
    pair.worker.close()
    with pytest.raises(LinkLost, match="rank 1 has closed"):
        pair.head.poll_progress(lambda p: None)


def test_progress_of_anything_but_a_load_is_a_session_error() -> None:
    pair = Pair().open()
    sent = pair.port.broadcast(Ping())
    pair.worker.receive()
    with pytest.raises(SessionError, match="progress is not allowed while busy"):
        pair.worker.reply(progress(sent, 1))
    pair.worker_end.send(encode_reply(progress(sent, 1)))
    with pytest.raises(SessionError, match="progress is not allowed while busy"):
        pair.head.collect(sent, 0)


def test_a_second_command_before_the_answer_is_refused_on_both_sides() -> None:
    pair = Pair().open()
    sent = pair.port.broadcast(Ping())
    with pytest.raises(SessionError, match="command is not allowed while busy"):
        pair.head.send(sent)
    with pytest.raises(SessionError, match="command is not allowed while busy"):
        pair.port.broadcast(Ping())
    pair.worker.receive()
    pair.head_end.send(sent.data)
    with pytest.raises(SessionError, match="command is not allowed while busy"):
        pair.worker.receive()


def test_only_the_command_last_sent_can_be_collected() -> None:
    pair = Pair().open()
    pair.port.broadcast(Ping())
    with pytest.raises(SessionError, match="command 9 is not the one last sent"):
        pair.head.collect(frame(2, Ping(), 9), 0)


def test_each_side_of_the_port_refuses_the_others_part() -> None:
    pair = Pair().open()
    with pytest.raises(SessionError, match="only the head gives commands"):
        pair.worker.broadcast(Ping())
    with pytest.raises(SessionError, match="receives none"):
        pair.port.receive()
    with pytest.raises(SessionError, match="sends no replies"):
        pair.port.reply(answer(frame(2, Ping(), 1)))


def test_each_progress_reply_gives_a_load_its_time_anew() -> None:
    baton = Baton(3)
    head_end, worker_end = memory_pair(baton, "the head", "rank 1")
    told: list[float] = []

    def lead() -> Reply:
        link = opened_head(head_end)
        sent = HeadPort(HeadSession(2, 1), [link]).broadcast(Load(8))
        return link.collect(sent, 1.0, lambda p: told.append(baton.now))

    def load() -> None:
        link = opened_worker(worker_end)
        sent = link.receive()
        for done in range(5):
            baton.wait_until(lambda: False, 0.8, "the disk")
            link.reply(progress(sent, done))
        baton.wait_until(lambda: False, 0.8, "the disk")
        link.reply(answer(sent))

    results = baton.run({"head": lead, "worker": load})
    assert results["worker"] is None
    assert results["head"].status is Status.OK
    assert baton.now == pytest.approx(4.8)
    assert len(told) == 5


def opened_head(end: Transport) -> HeadLink:
    link = HeadLink(Rank(1), end, 2, 1)
    link.expect_hello(30)
    link.welcome(Welcome(2, 1, ""))
    return link


def opened_worker(end: Transport) -> WorkerLink:
    link = WorkerLink(Rank(1), end, 2)
    link.hello(hello(2))
    link.expect_welcome(30)
    return link


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_whole_session_runs_over_every_transport(run: Callable[[Task, Task], dict[str, Any]]) -> None:
    commands = [Load(8), Decode(row(3)), Ping(), Shutdown()]

    def lead(end: Transport) -> list[bytes]:
        link, session, digests = opened_head(end), HeadSession(2, 1), []
        port = HeadPort(session, [link])
        for command in commands:
            digests.append(link.collect(port.broadcast(command), 30).digest)
            session.settle(True)
        link.close()
        return digests

    def follow(end: Transport) -> list[Any]:
        link, received = opened_worker(end), list[Any]()
        while not received or received[-1] != Shutdown():
            sent = link.receive()
            received.append(sent.command)
            link.reply(answer(sent))
        link.close()
        return received

    assert run(lead, follow) == {"head": [DIGEST] * 4, "worker": commands}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_refusal_arrives_although_the_head_leaves_at_once(run: Callable[[Task, Task], dict[str, Any]]) -> None:
    def refuse(end: Transport) -> None:
        link = HeadLink(Rank(1), end, 2, 1)
        link.expect_hello(30)
        link.welcome(Welcome(2, 1, "dtype: float32 and bfloat16"))
        link.close()

    result = run(refuse, lambda end: opened_worker(end))["worker"]
    assert isinstance(result, HandshakeError)
    assert result.message == "dtype: float32 and bfloat16"


def test_a_welcome_that_is_no_frame_is_link_lost() -> None:
    pair = Pair().greeted()
    assert isinstance(pair.head_end, MemoryTransport)
    pair.head_end.send(encode_welcome(Welcome(2, 1, ""))[:-1])
    with pytest.raises(LinkLost, match="from rank 0"):
        pair.worker.expect_welcome(0)
