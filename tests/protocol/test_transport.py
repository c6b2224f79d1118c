# SPDX-License-Identifier: MIT OR Apache-2.0
"""What every transport does: one suite, run over each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from metrale_ray.baton import Baton, Deadlock
from metrale_ray.errors import FrameError, LinkLost
from metrale_ray.protocol.limits import MAX_FRAME_BYTES
from metrale_ray.protocol.transport import Transport, memory_pair
from tests.protocol.transport_pairs import RUNS, Task

Run = Callable[[Task, Task], dict[str, Any]]


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> Run:
    return RUNS[request.param]


def receive_all(end: Transport) -> list[bytes]:
    """Everything until the peer has gone, and why it has, as the last element."""
    received = []
    while True:
        try:
            received.append(end.receive(None))
        except LinkLost as error:
            return [*received, error.message.encode()]


def test_frames_arrive_whole_in_order_and_each_once(run: Run) -> None:
    frames = [bytes([n]) * (n * 100) for n in range(50)]

    def send(end: Transport) -> None:
        for frame in frames:
            end.send(frame)
        end.close()

    assert run(send, receive_all)["worker"][:-1] == frames


def test_both_ends_send_and_receive(run: Run) -> None:
    def ask(end: Transport) -> bytes:
        end.send(b"ask")
        return end.receive(10)

    def answer(end: Transport) -> None:
        end.send(end.receive(None) + b", answer")

    assert run(ask, answer) == {"head": b"ask, answer", "worker": None}


def test_what_was_sent_before_an_orderly_close_is_read_before_the_loss_shows(run: Run) -> None:
    def leave(end: Transport) -> None:
        end.send(b"first")
        end.send(bytes(2**20))
        end.send(b"last words")
        end.close()

    got = run(receive_all, leave)["head"]
    assert got[:-1] == [b"first", bytes(2**20), b"last words"]
    assert b"the worker has" in got[-1]


def test_a_wait_without_limit_ends_when_the_peer_leaves(run: Run) -> None:
    def meet_and_leave(end: Transport) -> None:
        end.receive(10)
        end.close()

    def wait(end: Transport) -> bytes:
        end.send(b"hello")
        return end.receive(None)

    result = run(meet_and_leave, wait)["worker"]
    assert isinstance(result, LinkLost)
    assert "the head has" in result.message


def test_a_deadline_is_a_timeout_and_the_link_goes_on(run: Run) -> None:
    def late(end: Transport) -> tuple[str, bytes]:
        try:
            end.receive(0.05)
        except TimeoutError as error:
            end.send(b"now")
            return str(error), end.receive(10)
        raise AssertionError("nothing was sent, so nothing can come")

    def answer(end: Transport) -> None:
        end.send(end.receive(10) + b" then")

    message, data = run(late, answer)["head"]
    assert message == "nothing came from the worker within 0.05 s"
    assert data == b"now then"


def test_looking_without_waiting_finds_nothing_or_a_frame(run: Run) -> None:
    def look(end: Transport) -> tuple[type, bytes]:
        try:
            end.receive(0)
        except TimeoutError as error:
            found = type(error)
        end.send(b"go")
        first = end.receive(10)
        return found, first

    def answer(end: Transport) -> None:
        end.send(end.receive(10))

    assert run(look, answer)["head"] == (TimeoutError, b"go")


def test_a_peer_that_is_there_is_not_lost_and_one_that_left_is(run: Run) -> None:
    def meet_and_leave(end: Transport) -> str | None:
        end.send(end.receive(10))
        end.receive(10)
        reason = end.lost()
        end.close()
        return reason

    def watch(end: Transport) -> tuple[str | None, str | None]:
        end.send(b"hello")
        end.receive(10)
        before = end.lost()
        end.send(b"you may leave")
        with pytest.raises(LinkLost):
            end.receive(None)
        return before, end.lost()

    results = run(meet_and_leave, watch)
    before, after = results["worker"]
    assert (results["head"], before) == (None, None)
    assert after is not None
    assert after.startswith("the head has")


def test_sending_to_a_peer_that_has_gone_is_link_lost(run: Run) -> None:
    def meet_and_leave(end: Transport) -> None:
        end.receive(10)
        end.close()

    def shout(end: Transport) -> None:
        end.send(b"hello")
        with pytest.raises(LinkLost):
            end.receive(10)
        end.send(b"hello?")

    result = run(meet_and_leave, shout)["worker"]
    assert isinstance(result, LinkLost)


def test_a_closed_end_neither_sends_nor_receives_and_closes_again(run: Run) -> None:
    def leave(end: Transport) -> list[str]:
        end.send(b"hello")
        end.close()
        end.close()
        messages = []
        for use in (lambda: end.send(b"x"), lambda: end.receive(0), lambda: end.receive(None)):
            with pytest.raises(LinkLost) as caught:
                use()
            messages.append(caught.value.message)
        return messages

    assert run(leave, receive_all)["head"] == ["the connection to the worker was closed on this side"] * 3


def test_a_frame_above_the_limit_is_refused_by_the_sender_and_the_largest_arrives(run: Run) -> None:
    def send(end: Transport) -> None:
        with pytest.raises(FrameError, match=f"at most {MAX_FRAME_BYTES}"):
            end.send(bytes(MAX_FRAME_BYTES + 1))
        end.send(bytes(MAX_FRAME_BYTES))
        end.close()

    assert [len(data) for data in run(send, receive_all)["worker"][:-1]] == [MAX_FRAME_BYTES]


def test_two_memory_ends_that_wait_for_each_other_are_a_deadlock_that_names_both() -> None:
    baton = Baton(1)
    head, worker = memory_pair(baton, "the head", "rank 1")
    results = baton.run({"head": lambda: head.receive(None), "worker": lambda: worker.receive(None)})
    assert isinstance(results["head"], Deadlock)
    assert "a frame from rank 1" in str(results["head"])
    assert "a frame from the head" in str(results["worker"])


def test_a_memory_transport_that_only_looks_or_finds_a_frame_needs_no_baton() -> None:
    head, worker = memory_pair(Baton(), "the head", "rank 1")
    head.send(b"x")
    assert worker.receive(None) == b"x"
    with pytest.raises(TimeoutError):
        worker.receive(0)
