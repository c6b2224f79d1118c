# SPDX-License-Identifier: MIT OR Apache-2.0
"""The frames of a front's session: everything legal comes back equal, everything else is a FrameError."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.errors import FrameError
from metrale_ray.protocol.front.frames import (
    MAX_OUTPUT_TOKENS,
    MAX_OUTPUTS,
    MAX_PROMPT_TOKENS,
    decode_from_front,
    decode_from_head,
    encode,
)
from metrale_ray.protocol.front.messages import (
    Abort,
    Beat,
    Bye,
    Dead,
    Finish,
    FromFront,
    FromHead,
    Open,
    Opened,
    Output,
    Outputs,
    Read,
    Submit,
)
from metrale_ray.protocol.limits import MAX_ERROR_CHARS
from metrale_ray.sampling.params import SamplingParams

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
TOKEN_IDS = st.lists(U32, max_size=20).map(tuple)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=U32,
    top_p=st.floats(0, 1, exclude_min=True),
    seed=st.none() | U64,
    max_tokens=st.none() | st.integers(1, 2**32 - 1),
    ignore_eos=st.booleans(),
    stop=st.lists(st.text(min_size=1, max_size=20), max_size=16),
    stop_token_ids=st.lists(U32, max_size=128),
)
FROM_FRONT = st.one_of(
    st.builds(Open, U32),
    st.builds(Submit, U64, TOKEN_IDS, PARAMS),
    st.builds(Abort, U64),
    st.builds(Finish, U64),
    st.builds(Read, U64),
    st.just(Beat()),
    st.just(Bye()),
)
OUTPUT = st.one_of(
    st.builds(Output, U64, U32, TOKEN_IDS, st.sampled_from([None, "stop", "length", "abort"])),
    st.builds(Output, U64, U32, TOKEN_IDS, st.just("stop"), U32),
    st.builds(
        Output, U64, U32, TOKEN_IDS, st.just("error"), st.none(), st.tuples(st.text(max_size=64), st.text(max_size=99))
    ),
)
FROM_HEAD = st.one_of(
    st.builds(Opened, U32, U32, U64),
    st.builds(Outputs, U64, st.lists(OUTPUT, max_size=10).map(tuple)),
    st.just(Beat()),
    st.builds(Dead, st.text(max_size=99), st.none() | U32),
)
# Every field at a value that is not its default.
FULL_PARAMS = SamplingParams(
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    seed=2**64 - 1,
    max_tokens=7,
    ignore_eos=True,
    stop=["beta gamma", "é😀"],
    stop_token_ids=[2, 2**32 - 1],
)


@given(FROM_FRONT)
def test_what_a_front_says_comes_back_equal(message: FromFront) -> None:
    assert decode_from_front(encode(message)) == message


@given(FROM_HEAD)
def test_what_the_head_says_comes_back_equal(message: FromHead) -> None:
    assert decode_from_head(encode(message)) == message


@given(PARAMS)
def test_every_field_of_the_parameters_survives(params: SamplingParams) -> None:
    submit = decode_from_front(encode(Submit(1, (5,), params)))
    assert isinstance(submit, Submit)
    for field in dataclasses.fields(SamplingParams):
        sent, came = getattr(params, field.name), getattr(submit.params, field.name)
        assert (came, type(came)) == (sent, type(sent)), field.name


def test_no_field_of_the_parameters_is_at_its_default_in_the_full_example_or_missing_on_the_wire() -> None:
    wire = msgpack.unpackb(encode(Submit(1, (5,), FULL_PARAMS)))["params"]
    assert set(wire) == {field.name for field in dataclasses.fields(SamplingParams)}
    for field in dataclasses.fields(SamplingParams):
        assert getattr(FULL_PARAMS, field.name) != getattr(SamplingParams(), field.name), field.name
    assert decode_from_front(encode(Submit(1, (5,), FULL_PARAMS))) == Submit(1, (5,), FULL_PARAMS)


def test_the_longest_legal_messages_fit_into_one_frame() -> None:
    params = SamplingParams(stop=["😀" * 256] * 16, stop_token_ids=range(128))
    submit = Submit(2**64 - 1, tuple(range(MAX_PROMPT_TOKENS)), params)
    assert decode_from_front(encode(submit)) == submit
    failed = Output(2**64 - 1, 0, (), "error", None, ("e" * 64, "😀" * MAX_ERROR_CHARS))
    spoken = Output(2**64 - 1, 0, (2**32 - 1,) * MAX_OUTPUT_TOKENS, "stop", 2**32 - 1)
    for output in (failed, spoken):
        frame = Outputs(2**64 - 1, (output,) * MAX_OUTPUTS)
        assert decode_from_head(encode(frame)) == frame


def test_a_long_or_broken_error_text_is_cut_and_not_refused() -> None:
    output = Output(1, 0, (), "error", None, ("bad", "x\ud800" + "y" * 10_000))
    frame = decode_from_head(encode(Outputs(1, (output,))))
    assert isinstance(frame, Outputs)
    assert frame.outputs[0].error is not None
    assert frame.outputs[0].error[1].startswith("x\\ud800y")
    assert len(frame.outputs[0].error[1]) == MAX_ERROR_CHARS
    dead = decode_from_head(encode(Dead("z" * 10_000)))
    assert isinstance(dead, Dead)
    assert len(dead.reason) == MAX_ERROR_CHARS


@pytest.mark.parametrize(
    "message",
    [
        Submit(-1, (1,), SamplingParams()),
        Submit(2**64, (1,), SamplingParams()),
        Submit(True, (1,), SamplingParams()),
        Submit(1, (-1,), SamplingParams()),
        Submit(1, (2**32,), SamplingParams()),
        Submit(1, (1.0,), SamplingParams()),  # type: ignore[arg-type]
        Submit(1, (True,), SamplingParams()),
        Submit(1, (0,) * (MAX_PROMPT_TOKENS + 1), SamplingParams()),
        Outputs(1, (Output(1, 0, ()),) * (MAX_OUTPUTS + 1)),
        Outputs(1, (Output(1, 0, (0,) * (MAX_OUTPUT_TOKENS + 1)),)),
        Outputs(1, (Output(1, 0, (), "done"),)),  # type: ignore[arg-type]
        Outputs(1, (Output(1, 0, (), "error"),)),
        Outputs(1, (Output(1, 0, (), "stop", None, ("code", "text")),)),
        Outputs(1, (Output(1, 0, (), "length", 5),)),
        Outputs(1, (Output(1, 0, (), "error", None, ("c" * 65, "text")),)),
        Dead("x", -1),
    ],
    ids=lambda message: repr(message)[:60],
)
def test_what_no_reader_would_accept_is_not_sent(message: FromFront | FromHead) -> None:
    with pytest.raises(FrameError):
        encode(message)


def wire_of(message: FromFront | FromHead, **changes: Any) -> bytes:
    """The frame of `message` with some of its fields replaced."""
    return bytes(msgpack.packb({**msgpack.unpackb(encode(message)), **changes}))


def params_of(**changes: Any) -> bytes:
    params = msgpack.unpackb(encode(Submit(1, (5,), FULL_PARAMS)))["params"]
    return wire_of(Submit(1, (5,), FULL_PARAMS), params={**params, **changes})


BAD_FROM_FRONT: dict[str, bytes] = {
    "empty": b"",
    "not a map": msgpack.packb([1, 2]),
    "short": encode(Submit(1, (5,), FULL_PARAMS))[:-1],
    "long": encode(Beat()) + b"\xc0",
    "doubled": encode(Beat()) * 2,
    "the unused byte": b"\xc1",
    "a huge array header": b"\xdd\x74\xff\xfd\xbd",
    "a huge bin header": b"\xc6\xff\xff\xff\xff",
    "deeply nested": b"\x91" * 1100 + b"\xc0",
    "a pickle": pickle.dumps({"type": 6}),
    "no type": msgpack.packb({}),
    "an unknown type": msgpack.packb({"type": 99}),
    "a flag as type": msgpack.packb({"type": True}),
    "what only the head says": encode(Dead("x")),
    "open without version": msgpack.packb({"type": 1}),
    "no params": wire_of(Submit(1, (5,), FULL_PARAMS), params=None),
    "prompt as an array": wire_of(Submit(1, (5,), FULL_PARAMS), prompt_token_ids=[5]),
    "prompt of five bytes": wire_of(Submit(1, (5,), FULL_PARAMS), prompt_token_ids=b"12345"),
    "negative request": wire_of(Abort(1), request_id=-1),
    "request as a float": wire_of(Abort(1), request_id=1.0),
    "temperature not a number": params_of(temperature=math.nan),
    "temperature infinite": params_of(temperature=math.inf),
    "temperature too high": params_of(temperature=101.0),
    "top_p of zero": params_of(top_p=0.0),
    "top_k negative": params_of(top_k=-1),
    "seed too large for a float": params_of(seed=1e30),
    "max_tokens of zero": params_of(max_tokens=0),
    "ignore_eos as a number": params_of(ignore_eos=1),
    "stop empty": params_of(stop=[""]),
    "stop as bytes": params_of(stop=[b"x"]),
    "stop too long": params_of(stop=["x" * 257]),
    "too many stops": params_of(stop=["x"] * 17),
    "too many stop ids": params_of(stop_token_ids=b"1234" * 129),
}


@pytest.mark.parametrize("data", BAD_FROM_FRONT.values(), ids=BAD_FROM_FRONT.keys())
def test_a_bad_frame_of_a_front_is_a_frame_error_with_its_size(data: bytes) -> None:
    with pytest.raises(FrameError) as caught:
        decode_from_front(data)
    assert caught.value.num_bytes == len(data)


OUTPUT_WIRE = msgpack.unpackb(encode(Outputs(1, (Output(1, 0, (5,)),))))["outputs"][0]
BAD_FROM_HEAD: dict[str, bytes] = {
    "what only a front says": encode(Bye()),
    "outputs not maps": wire_of(Outputs(1, ()), outputs=[1]),
    "an unknown reason": wire_of(Outputs(1, ()), outputs=[{**OUTPUT_WIRE, "finish_reason": "done"}]),
    "an error without its reason": wire_of(
        Outputs(1, ()), outputs=[{**OUTPUT_WIRE, "error": {"code": "c", "message": "m"}}]
    ),
    "a stop token without a stop": wire_of(Outputs(1, ()), outputs=[{**OUTPUT_WIRE, "stop_token_id": 3}]),
    "a rank that is no number": wire_of(Dead("x"), rank="1"),
    "opened without its facts": msgpack.packb({"type": 8}),
}


@pytest.mark.parametrize("data", BAD_FROM_HEAD.values(), ids=BAD_FROM_HEAD.keys())
def test_a_bad_frame_of_the_head_is_a_frame_error(data: bytes) -> None:
    with pytest.raises(FrameError) as caught:
        decode_from_head(data)
    assert caught.value.num_bytes == len(data)


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_but_a_frame_error(data: bytes) -> None:
    for decode in (decode_from_front, decode_from_head):
        try:
            decode(data)
        except FrameError as error:
            assert error.num_bytes == len(data)  # noqa: PT017  random bytes may also be a message


@given(FROM_FRONT, st.data())
def test_a_cut_or_changed_frame_is_a_message_or_a_frame_error(message: FromFront, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    with pytest.raises(FrameError):
        decode_from_front(bytes(frame[: data.draw(st.integers(0, len(frame) - 1))]))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_from_front(bytes(frame))
    except FrameError as error:
        assert error.code == "frame_error"  # noqa: PT017  the changed frame may be legal too
