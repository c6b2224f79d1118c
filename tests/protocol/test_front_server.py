# SPDX-License-Identifier: MIT OR Apache-2.0
"""The head's end of the fronts' sessions, against real sockets that say legal and illegal things."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import struct
from pathlib import Path

import msgpack
import pytest
import zmq

from metrale_ray.errors import ConfigError, SessionError, StartError
from metrale_ray.protocol.front import server as server_module
from metrale_ray.protocol.front.frames import MAX_OUTPUTS, encode
from metrale_ray.protocol.front.messages import (
    FRONT_VERSION,
    Abort,
    Beat,
    Bye,
    Dead,
    Finish,
    Open,
    Output,
    Outputs,
    Read,
    Submit,
)
from metrale_ray.protocol.front.server import FrontId, FrontServer
from metrale_ray.sampling.token_params import TokenParams
from tests.protocol.front_rig import HEAD_KEYS, OPENED, WAIT_S, RawFront, Rig, raw_front, running

SUBMIT = Submit(9, (1, 2, 3), TokenParams(seed=2**64 - 1, n=2))


def test_requests_arrive_whole_and_outputs_come_back() -> None:
    with running() as rig, raw_front(rig.server.address) as front:
        for message in (SUBMIT, Finish(9), Abort(9)):
            front.say(message)
        front_id = FrontId(1)
        assert [rig.next_message() for _ in range(3)] == [
            (front_id, SUBMIT),
            (front_id, Finish(9)),
            (front_id, Abort(9)),
        ]
        rig.post(front_id, Output(9, 0, (4,)), Output(9, 0, (5,), "stop", 5))
        rig.post(front_id)  # nothing is no frame
        rig.post(front_id, Output(9, 0, (), "error", None, ("code", "text")))
        assert front.hear() == Outputs(1, (Output(9, 0, (4,)), Output(9, 0, (5,), "stop", 5)))
        assert front.hear() == Outputs(2, (Output(9, 0, (), "error", None, ("code", "text")),))


def test_each_front_has_its_own_session() -> None:
    with running() as rig, raw_front(rig.server.address) as one, raw_front(rig.server.address) as two:
        one.say(Abort(1))
        assert rig.next_message()[0] == FrontId(1)
        two.say(Abort(1))
        assert rig.next_message()[0] == FrontId(2)
        rig.post(FrontId(2), Output(1, 0, (22,)))
        rig.post(FrontId(1), Output(1, 0, (11,)))
        assert one.hear() == Outputs(1, (Output(1, 0, (11,)),))
        assert two.hear() == Outputs(1, (Output(1, 0, (22,)),))


def test_very_many_outputs_go_in_several_frames() -> None:
    outputs = [Output(n, 0, (), "abort") for n in range(2 * MAX_OUTPUTS + 1)]
    with running() as rig, raw_front(rig.server.address) as front:
        rig.post(FrontId(1), *outputs)
        frames = [front.hear() for _ in range(3)]
    assert [frame.number for frame in frames if isinstance(frame, Outputs)] == [1, 2, 3]
    assert [o for frame in frames if isinstance(frame, Outputs) for o in frame.outputs] == outputs


def test_a_front_that_leaves_is_gone_exactly_once() -> None:
    with running() as rig, raw_front(rig.server.address) as front, raw_front(rig.server.address) as other:
        front.say(Bye())
        assert rig.next_gone() == FrontId(1)
        rig.post(FrontId(1), Output(1, 0, ()))  # a step that ended meanwhile: no error, no effect
        other.say(Abort(3))
        assert rig.next_message() == (FrontId(2), Abort(3))
        assert rig.gone.empty()
        assert rig.server.num_fronts == 1


ILLEGAL: dict[str, tuple[bytes, ...]] = {
    "an empty frame": (b"",),
    "random bytes": (b"\x00\xff" * 50,),
    "a pickle": (pickle.dumps([1]),),
    "two frames": (encode(Beat()), encode(Beat())),
    "a frame with an empty one before it": (b"", encode(Beat())),
    "an unknown type": (msgpack.packb({"type": 77}),),
    "what only the head says": (encode(Dead("x")),),
    "a second open": (encode(Open()),),
    "a read of what was never posted": (encode(Read(1)),),
    "parameters out of range": (encode(SUBMIT).replace(b"temperature\xcb\x3f\xf0", b"temperature\xcb\xff\xf0"),),
    "a cut frame": (encode(SUBMIT)[:-1],),
}


@pytest.mark.parametrize("parts", ILLEGAL.values(), ids=ILLEGAL.keys())
def test_an_illegal_frame_ends_the_session_of_that_front_alone(parts: tuple[bytes, ...]) -> None:
    with running() as rig, raw_front(rig.server.address) as bad, raw_front(rig.server.address) as good:
        bad.say_bytes(*parts)
        answer = bad.hear()
        assert isinstance(answer, Dead)
        assert answer.reason.startswith("the head dropped this front: ")
        assert rig.next_gone() == FrontId(1)
        assert rig.server.num_refused == 1
        good.say(SUBMIT)
        assert rig.next_message() == (FrontId(2), SUBMIT)
        rig.post(FrontId(2), Output(9, 0, (1,)))
        assert good.hear() == Outputs(1, (Output(9, 0, (1,)),))


def test_a_read_that_goes_back_ends_the_session() -> None:
    with running() as rig, raw_front(rig.server.address) as front:
        rig.post(FrontId(1), Output(1, 0, ()))
        assert isinstance(front.hear(), Outputs)
        front.say(Read(1))
        front.say(Read(0))
        assert isinstance(front.hear(), Dead)
        assert rig.next_gone() == FrontId(1)


@pytest.mark.parametrize("first", [SUBMIT, Abort(1), Read(0), Beat(), Bye()], ids=lambda m: type(m).__name__)
def test_a_stranger_that_does_not_open_is_told_so_and_has_no_effect(first: Submit | Abort | Read | Beat | Bye) -> None:
    with running() as rig, raw_front(rig.server.address, opens=False) as stranger:
        stranger.say(first)
        answer = stranger.hear()
        assert isinstance(answer, Dead)
        assert "first message must be Open" in answer.reason
        assert rig.server.num_fronts == 0
        assert rig.messages.empty()
        assert rig.gone.empty()


def test_a_front_of_another_version_is_told_both_numbers() -> None:
    with running() as rig, raw_front(rig.server.address, opens=False) as front:
        front.say(Open(FRONT_VERSION + 1))
        answer = front.hear()
        assert isinstance(answer, Dead)
        assert f"version {FRONT_VERSION + 1}; the head speaks {FRONT_VERSION}" in answer.reason
        assert rig.server.num_fronts == 0


def test_the_number_of_fronts_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_FRONTS", 1)
    with running() as rig, raw_front(rig.server.address) as first:
        with raw_front(rig.server.address, opens=False) as second:
            second.say(Open())
            answer = second.hear()
            assert isinstance(answer, Dead)
            assert "has 1 fronts already" in answer.reason
        first.say(Bye())
        assert rig.next_gone() == FrontId(1)
        with raw_front(rig.server.address):
            assert rig.server.num_fronts == 1


def hear_outputs(front: RawFront) -> Outputs:
    """The next frame that is not a beat."""
    heard = front.hear()
    while heard == Beat():
        heard = front.hear()
    assert isinstance(heard, Outputs), heard
    return heard


def test_what_is_posted_while_a_front_does_not_read_waits_for_it_and_comes_in_few_frames() -> None:
    with running(credit=4) as rig, raw_front(rig.server.address) as front:
        for number in range(1, 2001):
            rig.loop.call_soon_threadsafe(rig.server.post, FrontId(1), [Output(number, 0, (), "abort")])
        rig.post(FrontId(1), Output(2001, 0, (), "abort"))
        taken: list[int] = []
        num_frames = 0
        while len(taken) < 2001:
            frame = hear_outputs(front)
            num_frames += 1
            assert frame.number == num_frames
            taken += [output.request_id for output in frame.outputs]
            if num_frames >= 4:  # all its credit is used up by then, and what is not here is held
                front.say(Read(num_frames))
        assert taken == list(range(1, 2002))
        assert num_frames < 20
        assert rig.gone.empty()


def test_a_front_that_reads_nothing_while_outputs_wait_is_dropped_although_it_beats() -> None:
    with (
        running(credit=4, beat_s=0.05, silence_s=0.3) as rig,
        raw_front(rig.server.address) as stuck,
        raw_front(rig.server.address) as quick,
    ):
        number = 0
        while rig.gone.empty():
            number += 1
            rig.post(FrontId(1), Output(1, 0, (number,)))
            rig.post(FrontId(2), Output(2, 0, (number,)))
            stuck.say(Beat())
            assert hear_outputs(quick) == Outputs(number, (Output(2, 0, (number,)),))
            quick.say(Read(number))
        assert rig.next_gone() == FrontId(1)
        assert [hear_outputs(stuck).number for _ in range(4)] == [1, 2, 3, 4]
        heard = stuck.hear()
        while heard == Beat():
            heard = stuck.hear()
        assert heard == Dead("the head dropped this front: it read nothing for 0.3 s, while outputs waited for it")
        assert rig.server.num_fronts == 1


def test_a_front_for_which_too_much_waits_is_dropped_and_told_so() -> None:
    with running(credit=1, max_held_bytes=1000) as rig, raw_front(rig.server.address) as slow:
        for number in range(1, 10):
            rig.post(FrontId(1), Output(1, 0, (number,)))
        assert rig.next_gone() == FrontId(1)
        assert hear_outputs(slow).number == 1
        answer = slow.hear()
        assert isinstance(answer, Dead)
        assert "1 frames unread and 8 outputs waiting behind them, which take more than 1000 bytes" in answer.reason


def test_a_front_whose_outputs_make_no_frame_is_dropped_and_told_so() -> None:
    with running() as rig, raw_front(rig.server.address) as front, raw_front(rig.server.address) as other:
        rig.post(FrontId(1), Output(1, 0, (), "stop", error=("code", "an error without its reason")))
        answer = front.hear()
        assert isinstance(answer, Dead)
        assert "its outputs do not make a frame: bad frame: an output has an error exactly when" in answer.reason
        assert rig.next_gone() == FrontId(1)
        rig.post(FrontId(2), Output(1, 0, (1,)))
        assert other.hear() == Outputs(1, (Output(1, 0, (1,)),))


def test_what_was_posted_before_the_end_is_sent_before_it() -> None:
    def post_and_die() -> None:
        rig.server.post(FrontId(1), [Output(1, 0, (), "abort")])
        rig.server.post_dead("the end")

    with running() as rig, raw_front(rig.server.address) as front:
        rig.call(post_and_die)
        assert front.hear() == Outputs(1, (Output(1, 0, (), "abort"),))
        assert front.hear() == Dead("the end")


def test_a_front_can_be_dropped_for_what_its_messages_mean() -> None:
    with running() as rig, raw_front(rig.server.address) as front:
        rig.call(rig.server.drop, FrontId(1), "it says the same thing twice")
        rig.call(rig.server.drop, FrontId(1), "it says the same thing twice")  # it has gone
        assert front.hear() == Dead("the head dropped this front: it says the same thing twice")
        assert rig.next_gone() == FrontId(1)
        assert rig.server.num_refused == 1
        assert rig.gone.empty()


def test_a_front_that_vanished_is_noticed_by_the_next_beat_or_post() -> None:
    with running(beat_s=0.05, silence_s=1_000.0) as rig:
        with raw_front(rig.server.address):
            pass
        assert rig.next_gone() == FrontId(1)
        assert rig.server.num_fronts == 0


def test_a_silent_front_is_dropped() -> None:
    with running(beat_s=0.05, silence_s=0.2) as rig, raw_front(rig.server.address) as silent:
        heard = silent.hear()
        while heard == Beat():
            heard = silent.hear()
        assert heard == Dead("the head dropped this front: it was silent for 0.2 s")
        assert rig.next_gone() == FrontId(1)


def test_a_front_that_beats_is_not_dropped() -> None:
    with running(beat_s=0.05, silence_s=1.0) as rig, raw_front(rig.server.address) as beating:
        for _ in range(30):  # half as long again as silence may last
            assert beating.hear() == Beat()
            beating.say(Beat())
        assert rig.gone.empty()


def test_a_loop_that_was_held_up_does_not_take_its_fronts_for_silent() -> None:
    with running(beat_s=0.05, silence_s=1.0) as rig, raw_front(rig.server.address) as front:
        with socket.socket() as never:  # a wait during which the loop can do nothing
            never.bind(("127.0.0.1", 0))
            never.settimeout(1.5)
            never.listen()
            with pytest.raises(TimeoutError):
                rig.call(never.accept)
        front.say(SUBMIT)
        assert rig.next_message() == (FrontId(1), SUBMIT)
        assert rig.gone.empty()


def test_the_engines_death_reaches_every_front_and_every_later_one() -> None:
    with running() as rig, raw_front(rig.server.address) as one, raw_front(rig.server.address) as two:
        rig.call(rig.server.post_dead, "rank 1 has gone", 1)
        rig.call(rig.server.post_dead, "a later reason", None)
        for front in (one, two):
            assert front.hear() == Dead("rank 1 has gone", 1)
        with raw_front(rig.server.address, opens=False) as late:
            late.say(Open())
            assert late.hear() == Dead("rank 1 has gone", 1)
        assert rig.gone.empty()
        assert rig.server.num_fronts == 0


def test_closing_tells_every_front_and_frees_the_port() -> None:
    with running() as rig, raw_front(rig.server.address) as front:
        rig.wait(rig.server.close())
        assert front.hear() == Dead("the engine was stopped")
        rig.wait(rig.server.close())  # a second time does nothing
        port = int(rig.server.address.rpartition(":")[2])
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))


def test_a_head_that_fails_on_a_message_says_so_to_everybody_and_to_whoever_waits_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()

    def fail(front_id: FrontId, message: object) -> None:
        raise ZeroDivisionError("no engine")

    rig.server._on_message = fail
    try:
        with raw_front(rig.server.address) as front:
            front.say(SUBMIT)
            assert front.hear() == Dead("the front server failed: no engine")
            assert isinstance(rig.wait(rig.server.wait_failed()), ZeroDivisionError)
            rig.wait(rig.server.close())
            assert isinstance(rig.server.failure, ZeroDivisionError)
        assert "the front server failed" in caplog.text
    finally:
        rig.stop()


def test_a_frame_above_the_limit_costs_its_sender_the_connection_and_nobody_else() -> None:
    with running(beat_s=0.05, silence_s=1_000.0) as rig, raw_front(rig.server.address) as front:
        with raw_front(rig.server.address) as huge:
            huge.say_bytes(b"x" * (16 * 2**20 + 1))
            assert rig.next_gone() == FrontId(2)
        front.say(SUBMIT)
        assert rig.next_message() == (FrontId(1), SUBMIT)


def test_a_stranger_that_speaks_no_zeromq_has_no_effect(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "marker",)

    with running() as rig:
        port = int(rig.server.address.rpartition(":")[2])
        payload = pickle.dumps(Payload())
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as stranger:
            stranger.sendall(struct.pack("<I", len(payload)) + payload + b"\0" * 100)
            with contextlib.suppress(ConnectionResetError):  # it may be turned away before all of it was read
                stranger.recv(100)
        with raw_front(rig.server.address) as front:
            front.say_bytes(payload)
            assert isinstance(front.hear(), Dead)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::", "[::]"])
def test_an_address_that_means_every_interface_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="every interface"):
        FrontServer(host, lambda front_id, message: None, lambda front_id: None, lambda: OPENED, HEAD_KEYS)


def test_an_address_that_this_machine_does_not_have_is_a_start_error() -> None:
    server = FrontServer("192.0.2.1", lambda front_id, message: None, lambda front_id: None, lambda: OPENED, HEAD_KEYS)
    with pytest.raises(StartError, match=r"cannot listen for fronts on 192\.0\.2\.1"):
        asyncio.run(server.start())
    asyncio.run(server.close())


def test_there_is_no_address_before_the_start() -> None:
    server = FrontServer("127.0.0.1", lambda front_id, message: None, lambda front_id: None, lambda: OPENED, HEAD_KEYS)
    with pytest.raises(SessionError, match="before it is started"):
        _ = server.address


def test_it_listens_on_its_own_address_alone() -> None:
    with running() as rig:
        assert rig.server.address.startswith("tcp://127.0.0.1:")
        other = rig.server.address.replace("127.0.0.1", "127.0.0.2")
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        monitor = dealer.get_monitor_socket(zmq.EVENT_CLOSED | zmq.EVENT_CONNECTED)
        dealer.connect(other)
        assert monitor.poll(WAIT_S * 1000)
        assert struct.unpack("=HI", monitor.recv_multipart()[0])[0] == zmq.EVENT_CLOSED
        context.destroy(linger=0)
