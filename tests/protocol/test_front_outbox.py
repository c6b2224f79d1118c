# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is sent to a front and what is held for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.errors import SessionError
from metrale_ray.protocol.front.frames import MAX_OUTPUT_LOGPROBS, MAX_OUTPUTS, encode
from metrale_ray.protocol.front.messages import Output, Outputs
from metrale_ray.protocol.front.outbox import FRAME_BYTES, Outbox, max_bytes_of
from metrale_ray.protocol.limits import MAX_CODE_CHARS, MAX_ERROR_CHARS, U32_MAX, U64_MAX
from metrale_ray.sampling.logprobs import TokenLogprobs

HIGHEST = TokenLogprobs(U32_MAX, -0.1, U32_MAX, (U32_MAX,) * 20, (-0.1,) * 20)


def an_output(number: int) -> Output:
    return Output(number, 0, (number,))


def send_all(outbox: Outbox) -> list[tuple[Output, ...]]:
    frames = []
    while outputs := outbox.next_frame():
        outbox.sent(len(encode(Outputs(outbox.num_sent + 1, outputs))))
        frames.append(outputs)
    return frames


@given(st.lists(st.one_of(st.integers(1, 700), st.none()), max_size=40), st.integers(1, 4))
def test_everything_goes_out_once_and_in_order_and_never_beyond_the_credit(
    events: list[int | None], credit: int
) -> None:
    """A number posts so many outputs, None reads all that was sent."""
    outbox, given_, taken = Outbox(credit), 0, []
    for event in [*events, *[None] * 60]:
        if event is None:
            outbox.read(outbox.num_sent)
        else:
            outbox.add(an_output(given_ + number) for number in range(event))
            given_ += event
        taken += [output.request_id for frame in send_all(outbox) for output in frame]
        assert outbox.num_sent - outbox.num_read <= credit
        assert not outbox.holds_outputs or outbox.num_sent - outbox.num_read == credit
    assert taken == list(range(given_))


def test_a_frame_holds_as_many_outputs_as_it_may() -> None:
    outbox = Outbox()
    outbox.add(map(an_output, range(2 * MAX_OUTPUTS + 1)))
    assert [len(frame) for frame in send_all(outbox)] == [MAX_OUTPUTS, MAX_OUTPUTS, 1]


LARGE = [
    Output(U64_MAX, U32_MAX, (U32_MAX,) * 64),
    Output(U64_MAX, 0, (), "error", None, ("c" * MAX_CODE_CHARS, "\U0001f600" * MAX_ERROR_CHARS), is_refusal=True),
    Output(U64_MAX, U32_MAX, (U32_MAX,), "length", None, None, (HIGHEST,)),
    Output(U64_MAX, 0, (U32_MAX,) * 64, "stop", U32_MAX, None, (HIGHEST,) * 64, (HIGHEST,) * MAX_OUTPUT_LOGPROBS),
]


@pytest.mark.parametrize("output", LARGE, ids=["tokens", "error", "logprobs", "all"])
def test_an_output_takes_no_more_than_is_counted_for_it(output: Output) -> None:
    empty = len(encode(Outputs(1, ())))
    assert len(encode(Outputs(1, (output,)))) - empty <= max_bytes_of(output)


@pytest.mark.parametrize("output", LARGE, ids=["tokens", "error", "logprobs", "all"])
def test_many_large_outputs_make_frames_that_can_be_sent(output: Output) -> None:
    outbox = Outbox(credit_bytes=2**40)
    outbox.add([output] * MAX_OUTPUTS)
    frames = send_all(outbox)
    assert sum(map(len, frames)) == MAX_OUTPUTS
    assert all(len(encode(Outputs(1, frame))) <= FRAME_BYTES + 64 for frame in frames)


def test_unread_bytes_use_up_the_credit_as_frames_do_but_one_frame_may_always_go() -> None:
    outbox = Outbox(credit_bytes=100)
    for number in (1, 2):
        outbox.add([an_output(number)])
        outputs = outbox.next_frame()
        assert outputs
        outbox.sent(1000)
        outbox.add([an_output(0)])
        assert not outbox.next_frame()
        outbox.read(number)
        assert outbox.next_frame()
        outbox.read(number)


def test_too_many_held_bytes_are_named() -> None:
    outbox = Outbox(credit_frames=1, max_held_bytes=10 * max_bytes_of(an_output(1)))
    outbox.add([an_output(0)])
    assert send_all(outbox)
    outbox.add(map(an_output, range(10)))
    assert outbox.overflow() is None
    outbox.add([an_output(10)])
    assert "1 frames unread and 11 outputs waiting" in (outbox.overflow() or "")
    outbox.read(1)
    send_all(outbox)
    assert outbox.overflow() is None


def test_beats_count_only_while_something_is_held_and_nothing_is_read() -> None:
    outbox = Outbox(credit_frames=2)
    outbox.add([an_output(0)])
    send_all(outbox)
    assert not any(outbox.beat(1) for _ in range(5))  # unread, but nothing waits
    for number in (1, 2):
        outbox.add([an_output(number)])
        send_all(outbox)
    assert [outbox.beat(2) for _ in range(2)] == [False, False]
    outbox.read(0)  # says nothing new
    assert outbox.beat(2)
    outbox.read(1)
    assert not outbox.beat(2)


@pytest.mark.parametrize("num_frames", [0, 3])
def test_a_read_of_less_than_before_or_of_more_than_was_sent_is_refused(num_frames: int) -> None:
    outbox = Outbox()
    for number in (1, 2):
        outbox.add([an_output(number)])
        send_all(outbox)
    outbox.read(1)
    with pytest.raises(SessionError, match=f"Read says {num_frames} frames; 1 were read and 2 sent"):
        outbox.read(num_frames)
