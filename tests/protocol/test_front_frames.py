# SPDX-License-Identifier: MIT OR Apache-2.0
"""The frames of a front's session: everything legal comes back equal, everything else is a FrameError."""

from __future__ import annotations

import dataclasses
import math
import pickle
import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.errors import FrameError
from metrale_ray.protocol.front.frames import (
    MAX_OUTPUT_LOGPROBS,
    MAX_OUTPUT_TOKENS,
    MAX_OUTPUTS,
    MAX_PROMPT_TOKENS,
    FrontDecoder,
    decode_from_front,
    decode_from_head,
    encode,
    encode_submit,
)
from metrale_ray.protocol.front.messages import (
    MAX_DOCUMENT_CHARS,
    MAX_TIMEOUT_S,
    Abort,
    Ask,
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
    Told,
)
from metrale_ray.protocol.front.params_map import WAYS, PackedParams, params_to_map
from metrale_ray.protocol.limits import MAX_ERROR_CHARS
from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.sampling.token_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_SEQUENCE_TOKENS,
    MAX_BAD_SEQUENCES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    TokenParams,
)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
TOKEN_IDS = st.lists(U32, max_size=20).map(tuple)
PARAMS = st.builds(
    TokenParams,
    n=st.integers(1, 64),
    temperature=st.floats(0, 100),
    top_k=U32,
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.none() | U64,
    max_tokens=st.none() | st.integers(9, 2**32 - 1),
    min_tokens=st.integers(0, 9),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(U32, max_size=128),
    repetition_penalty=st.floats(0, 100, exclude_min=True),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(U32, st.floats(-100, 100), max_size=20),
    allowed_token_ids=st.none() | st.lists(U32, min_size=1, max_size=20),
    bad_token_ids=st.lists(st.lists(U32, min_size=1, max_size=5), max_size=5),
    end_token_ids=st.lists(U32, max_size=10),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)
FROM_FRONT = st.one_of(
    st.builds(Open, U32),
    st.builds(
        Submit,
        U64,
        TOKEN_IDS,
        PARAMS,
        st.integers(-(2**31), 2**31 - 1),
        st.none() | st.floats(0, MAX_TIMEOUT_S, exclude_min=True),
    ),
    st.builds(Abort, U64),
    st.builds(Finish, U64, U32),
    st.builds(Read, U64),
    st.just(Beat()),
    st.just(Bye()),
    st.builds(Ask, U64),
)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
LOGPROB = st.lists(st.tuples(U32, FINITE), max_size=MAX_LOGPROBS).flatmap(
    lambda tops: st.builds(
        TokenLogprobs,
        U32,
        FINITE,
        st.integers(1, 2**32 - 1),
        st.just(tuple(token_id for token_id, _ in tops)),
        st.just(tuple(logprob for _, logprob in tops)),
    )
)
OUTPUT = st.one_of(
    st.builds(
        lambda request_id, logprobs, prompt_logprobs: Output(
            request_id,
            0,
            tuple(each.token_id for each in logprobs),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        ),
        U64,
        st.lists(LOGPROB, max_size=3).map(tuple),
        st.lists(LOGPROB, max_size=3).map(tuple),
    ),
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
    st.builds(Told, U64, st.text(max_size=99)),
)
# Every field at a value that is not its default.
FULL_PARAMS = TokenParams(
    n=4,
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    seed=2**64 - 1,
    max_tokens=7,
    min_tokens=3,
    ignore_eos=True,
    stop_token_ids=[2, 2**32 - 1],
    repetition_penalty=1.2,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    logit_bias={3: -100.0, 2**32 - 1: 0.5},
    allowed_token_ids=[1, 2, 3],
    bad_token_ids=[[5], [6, 7]],
    end_token_ids=[9],
    logprobs=5,
    prompt_logprobs=0,
    grammar="start: 'a'",
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
    for field in dataclasses.fields(TokenParams):
        sent, came = getattr(params, field.name), getattr(submit.params, field.name)
        assert (came, type(came)) == (sent, type(sent)), field.name


def test_no_field_of_the_parameters_is_at_its_default_in_the_full_example_or_missing_on_the_wire() -> None:
    full = Submit(1, (5,), FULL_PARAMS, priority=-3, timeout_s=1.5)
    wire = msgpack.unpackb(encode(full))
    names = {field.name for field in dataclasses.fields(TokenParams)}
    assert set(wire["params"]) == set(WAYS) == names
    for name in names:
        assert getattr(FULL_PARAMS, name) != getattr(TokenParams(), name), name
    assert set(wire) == {"type"} | {field.name for field in dataclasses.fields(Submit)}
    assert decode_from_front(encode(full)) == full


def test_the_texts_of_the_parameters_stay_in_the_front() -> None:
    params = SamplingParams(stop=["beta gamma"], bad_words=["delta"], temperature=0.3)
    data = encode(Submit(1, (5,), params))
    assert b"gamma" not in data
    assert b"delta" not in data
    assert decode_from_front(data) == Submit(1, (5,), params.for_tokens())


@given(FROM_FRONT)
def test_a_frame_around_parameters_that_were_packed_before_is_like_one_packed_as_a_whole(message: FromFront) -> None:
    if isinstance(message, Submit):
        frame = encode_submit(message, PackedParams(message.params))
        values = msgpack.unpackb(frame)
        assert values["params"] == params_to_map(message.params)
        assert frame == msgpack.packb(values)
        assert decode_from_front(frame) == message


def test_the_size_of_packed_parameters_and_their_largest_field_are_known() -> None:
    small, ids = (
        PackedParams(TokenParams()),
        PackedParams(TokenParams(allowed_token_ids=range(1000), grammar="g" * 999)),
    )
    assert 4999 < ids.num_bytes - small.num_bytes < 5010
    assert ids.largest_field() == "allowed_token_ids"
    assert PackedParams(TokenParams(bad_token_ids=[[1, 2]] * 9)).largest_field() == "bad_token_ids"


def test_parameters_that_come_several_times_in_a_row_are_one_object() -> None:
    decoder = FrontDecoder()

    def params_of(params: TokenParams, request_id: int) -> TokenParams:
        message = decoder.decode(encode(Submit(request_id, (5,), params)))
        assert message == Submit(request_id, (5,), params)
        assert isinstance(message, Submit)
        return message.params

    one, other = TokenParams(seed=1), TokenParams(seed=2)
    first = params_of(one, 1)
    assert params_of(one, 2) is first
    assert params_of(other, 3) is not first
    assert params_of(one, 4) is not first  # only the last ones are kept
    assert decoder.decode(encode(Abort(1))) == Abort(1)


def test_parameters_that_only_python_takes_for_the_same_are_still_refused() -> None:
    decoder = FrontDecoder()
    values = msgpack.unpackb(encode(Submit(1, (5,), TokenParams())))
    decoder.decode(msgpack.packb(values))
    for wrong in (True, 1.0):
        with pytest.raises(FrameError):
            decoder.decode(msgpack.packb({**values, "params": {**values["params"], "n": wrong}}))


def test_the_longest_legal_messages_fit_into_one_frame() -> None:
    params = TokenParams(
        stop_token_ids=range(128),
        logit_bias=dict.fromkeys(range(MAX_LOGIT_BIASES), 0.5),
        allowed_token_ids=range(MAX_ALLOWED_TOKEN_IDS),
        bad_token_ids=[range(MAX_BAD_SEQUENCE_TOKENS)] * MAX_BAD_SEQUENCES,
        end_token_ids=range(64),
    )
    submit = Submit(2**64 - 1, tuple(range(MAX_PROMPT_TOKENS)), params)
    assert decode_from_front(encode(submit)) == submit
    failed = Output(2**64 - 1, 0, (), "error", None, ("e" * 64, "😀" * MAX_ERROR_CHARS))
    spoken = Output(2**64 - 1, 0, (2**32 - 1,) * MAX_OUTPUT_TOKENS, "stop", 2**32 - 1)
    told = (TokenLogprobs(2**32 - 1, -1.5, 2**32 - 1, (2**32 - 1,) * 20, (-0.5,) * 20),)
    step = Output(2**64 - 1, 0, (7,), "stop", 7, logprobs=told, prompt_logprobs=told)
    document = Told(2**64 - 1, "😀" * MAX_DOCUMENT_CHARS)
    assert decode_from_head(encode(document)) == document
    for output in (failed, spoken, step):
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
        Outputs(1, (Output(1, 0, (), is_refusal=True),)),
        Outputs(1, (Output(1, 1, (), "error", None, ("c", "text"), is_refusal=True),)),
        Outputs(1, (Output(1, 0, (5,), logprobs=(TokenLogprobs(5, math.nan, 1),)),)),
        Outputs(1, (Output(1, 0, (5,), logprobs=(TokenLogprobs(5, -math.inf, 1),)),)),
        Outputs(1, (Output(1, 0, (5, 6), logprobs=(TokenLogprobs(5, -0.5, 1),)),)),
        Outputs(1, (Output(1, 1, (), prompt_logprobs=(TokenLogprobs(5, -0.5, 1),)),)),
        Outputs(1, (Output(1, 0, (), prompt_logprobs=(TokenLogprobs(5, -0.5, 1),) * (MAX_OUTPUT_LOGPROBS + 1)),)),
        Submit(1, (1,), TokenParams(), 2**31),
        Submit(1, (1,), TokenParams(), -(2**31) - 1),
        Submit(1, (1,), TokenParams(), True),
        Submit(1, (1,), TokenParams(), 0, 0.0),
        Submit(1, (1,), TokenParams(), 0, math.nan),
        Submit(1, (1,), TokenParams(), 0, math.inf),
        Submit(1, (1,), TokenParams(), 0, MAX_TIMEOUT_S * 2),
        Submit(1, (1,), TokenParams(), 0, "5"),  # type: ignore[arg-type]
        Finish(1, -1),
        Dead("x", -1),
        Ask(-1),
        Told(-1, "{}"),
        Told(1, "x" * (MAX_DOCUMENT_CHARS + 1)),
        Told(1, "\ud800"),
        Told(1, {}),  # type: ignore[arg-type]
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
    "no n": params_of(n=None),
    "n of zero": params_of(n=0),
    "n too large": params_of(n=65),
    "min_p negative": params_of(min_p=-0.1),
    "min_tokens above max_tokens": params_of(min_tokens=8),
    "penalty not a number": params_of(repetition_penalty="1"),
    "bias not finite": params_of(logit_bias={"token_ids": b"1234", "biases": struct.pack("<d", math.nan)}),
    "a bias too few": params_of(logit_bias={"token_ids": b"1234", "biases": b""}),
    "a bias of seven bytes": params_of(logit_bias={"token_ids": b"1234", "biases": b"1234567"}),
    "bias as a plain map": params_of(logit_bias={5: 1.0}),
    "no token allowed": params_of(allowed_token_ids=b""),
    "an empty bad sequence": params_of(bad_token_ids={"lengths": bytes(4), "token_ids": b""}),
    "bad sequences that do not add up": params_of(bad_token_ids={"lengths": b"\x02\0\0\0", "token_ids": b"1234"}),
    "logprobs too large": params_of(logprobs=21),
    "prompt_logprobs as a flag": params_of(prompt_logprobs=True),
    "an empty grammar": params_of(grammar=""),
    "a grammar in bytes": params_of(grammar=b"start"),
    "a grammar too long": params_of(grammar="x" * (2**18 + 1)),
    "no priority": wire_of(Submit(1, (5,), FULL_PARAMS), priority=None),
    "priority as a float": wire_of(Submit(1, (5,), FULL_PARAMS), priority=1.0),
    "priority too low": wire_of(Submit(1, (5,), FULL_PARAMS), priority=-(2**31) - 1),
    "timeout of zero": wire_of(Submit(1, (5,), FULL_PARAMS), timeout_s=0),
    "timeout infinite": wire_of(Submit(1, (5,), FULL_PARAMS), timeout_s=math.inf),
    "finish without an index": msgpack.packb({"type": 4, "request_id": 1}),
    "a question without its number": msgpack.packb({"type": 11}),
    "a question numbered with a float": wire_of(Ask(1), number=1.0),
    "too many stop ids": params_of(stop_token_ids=b"1234" * 129),
}


@pytest.mark.parametrize("data", BAD_FROM_FRONT.values(), ids=BAD_FROM_FRONT.keys())
def test_a_bad_frame_of_a_front_is_a_frame_error_with_its_size(data: bytes) -> None:
    with pytest.raises(FrameError) as caught:
        decode_from_front(data)
    assert caught.value.num_bytes == len(data)


OUTPUT_WIRE = msgpack.unpackb(encode(Outputs(1, (Output(1, 0, (5,)),))))["outputs"][0]
LOGPROBS_WIRE = {
    "token_ids": b"1234",
    "logprobs": bytes(8),
    "ranks": b"\x01\0\0\0",
    "top_counts": b"\x01\0\0\0",
    "top_ids": b"1234",
    "top_logprobs": bytes(8),
}


def outputs_with(**changes: bytes) -> bytes:
    """A frame of one output whose log probabilities have some of their arrays replaced."""
    return wire_of(Outputs(1, ()), outputs=[{**OUTPUT_WIRE, "logprobs": {**LOGPROBS_WIRE, **changes}}])


def test_the_log_probabilities_that_the_bad_frames_are_made_of_are_good() -> None:
    frame = decode_from_head(outputs_with())
    assert isinstance(frame, Outputs)
    token_id = int.from_bytes(b"1234", "little")
    assert frame.outputs[0].logprobs == (TokenLogprobs(token_id, 0.0, 1, (token_id,), (0.0,)),)


BAD_FROM_HEAD: dict[str, bytes] = {
    "a log probability too many": outputs_with(logprobs=bytes(16)),
    "a log probability that is infinite": outputs_with(logprobs=struct.pack("<d", -math.inf)),
    "a candidate too few": outputs_with(top_ids=b""),
    "a candidate that is not a number": outputs_with(top_logprobs=struct.pack("<d", math.nan)),
    "a rank of zero": outputs_with(ranks=bytes(4)),
    "no ranks": outputs_with(ranks=b""),
    "a refusal without a reason": wire_of(
        Outputs(1, ()), outputs=[{**OUTPUT_WIRE, "finish_reason": "stop", "is_refusal": True}]
    ),
    "what only a front says": encode(Bye()),
    "outputs not maps": wire_of(Outputs(1, ()), outputs=[1]),
    "an unknown reason": wire_of(Outputs(1, ()), outputs=[{**OUTPUT_WIRE, "finish_reason": "done"}]),
    "an error without its reason": wire_of(
        Outputs(1, ()), outputs=[{**OUTPUT_WIRE, "error": {"code": "c", "message": "m"}}]
    ),
    "a stop token without a stop": wire_of(Outputs(1, ()), outputs=[{**OUTPUT_WIRE, "stop_token_id": 3}]),
    "a rank that is no number": wire_of(Dead("x"), rank="1"),
    "figures that are bytes": wire_of(Told(1, "{}"), document=b"{}"),
    "figures that are too long": wire_of(Told(1, "{}"), document="x" * (MAX_DOCUMENT_CHARS + 1)),
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
