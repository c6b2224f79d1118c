# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every integer of the handshake and of a front's session arrives exactly, or is refused by the side that has it.

The integers of commands and replies are in the codec's own tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from msgpack import fallback

from metrale_ray.errors import FrameError, RequestError
from metrale_ray.protocol import fields
from metrale_ray.protocol.codec import decode_hello, decode_welcome, encode_hello, encode_welcome
from metrale_ray.protocol.commands import Welcome
from metrale_ray.protocol.front.frames import decode_from_front, decode_from_head, encode
from metrale_ray.protocol.front.messages import Abort, Dead, Finish, Open, Opened, Output, Outputs, Read, Submit
from metrale_ray.protocol.limits import I32_MAX, I32_MIN, U32_MAX, U64_MAX
from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.sampling.token_params import TokenParams
from tests.protocol.samples import EDGES, NO_INTEGERS, hello

BEYOND_I32 = (-(2**31), -(2**31) - 1)
REFUSED = (FrameError, RequestError)


@dataclasses.dataclass(frozen=True)
class Field:
    """One integer of a message: `there` sends a message with it and reads it back, within `least` and `largest`."""

    there: Callable[[Any], int]
    largest: int
    least: int = 0


def greeted(**changes: Any) -> Any:
    return decode_hello(encode_hello(dataclasses.replace(hello(2), **changes)))


def welcomed(*values: Any) -> Any:
    return decode_welcome(encode_welcome(Welcome(*values, "")))


def from_front(message: Any) -> Any:
    return decode_from_front(encode(message))


def from_head(message: Any) -> Any:
    return decode_from_head(encode(message))


def submitted(*prompt: Any, **params: Any) -> Any:
    return from_front(Submit(1, prompt or (5,), TokenParams(**params)))


def scored(**changes: Any) -> Any:
    scores = dataclasses.replace(TokenLogprobs(4, -0.5, 1, (4,), (-0.5,)), **changes)
    return from_head(Outputs(1, (Output(1, 0, (4,), logprobs=(scores,)),))).outputs[0].logprobs[0]


def put_out(*values: Any, **fields: Any) -> Any:
    return from_head(Outputs(1, (Output(*values, **fields),))).outputs[0]


FIELDS: dict[str, Field] = {
    "hello rank": Field(lambda n: greeted(rank=n).rank, U32_MAX),
    "hello version": Field(lambda n: greeted(version=n).version, U32_MAX),
    "hello blocks": Field(lambda n: greeted(num_blocks=n).num_blocks, U32_MAX),
    "welcome version": Field(lambda n: welcomed(n, 1).version, U32_MAX),
    "welcome epoch": Field(lambda n: welcomed(2, n).epoch, U32_MAX),
    "open version": Field(lambda n: from_front(Open(n)).version, U32_MAX),
    "submit request": Field(lambda n: from_front(Submit(n, (5,), TokenParams())).request_id, U64_MAX),
    "submit token": Field(lambda n: submitted(1, n).prompt_token_ids[1], U32_MAX),
    "submit priority": Field(lambda n: from_front(Submit(1, (5,), TokenParams(), n)).priority, I32_MAX, I32_MIN),
    "submit seed": Field(lambda n: submitted(seed=n).params.seed, U64_MAX),
    "submit top_k": Field(lambda n: submitted(top_k=n).params.top_k, U32_MAX, -1),
    "submit max_tokens": Field(lambda n: submitted(max_tokens=n).params.max_tokens, U32_MAX, 1),
    "submit stop token": Field(lambda n: submitted(stop_token_ids=[n]).params.stop_token_ids[0], U32_MAX),
    "submit end token": Field(lambda n: submitted(end_token_ids=[n]).params.end_token_ids[0], U32_MAX),
    "submit allowed token": Field(lambda n: submitted(allowed_token_ids=[n]).params.allowed_token_ids[0], U32_MAX),
    "submit bad token": Field(lambda n: submitted(bad_token_ids=[[n]]).params.bad_token_ids[0][0], U32_MAX),
    "submit bias token": Field(lambda n: submitted(logit_bias=[(n, 1.0)]).params.logit_bias[0][0], U32_MAX),
    "abort request": Field(lambda n: from_front(Abort(n)).request_id, U64_MAX),
    "finish request": Field(lambda n: from_front(Finish(n)).request_id, U64_MAX),
    "finish index": Field(lambda n: from_front(Finish(1, n)).index, U32_MAX),
    "read frames": Field(lambda n: from_front(Read(n)).num_frames, U64_MAX),
    "opened length": Field(lambda n: from_head(Opened(n, 1, 1)).max_model_len, U32_MAX),
    "opened vocabulary": Field(lambda n: from_head(Opened(1, n, 1)).vocab_size, U32_MAX),
    "opened epoch": Field(lambda n: from_head(Opened(1, 1, n)).engine_epoch, U64_MAX),
    "outputs number": Field(lambda n: from_head(Outputs(n, ())).number, U64_MAX),
    "output request": Field(lambda n: put_out(n, 0, ()).request_id, U64_MAX),
    "output index": Field(lambda n: put_out(1, n, ()).index, U32_MAX),
    "output token": Field(lambda n: put_out(1, 0, (n,)).token_ids[0], U32_MAX),
    "output stop token": Field(lambda n: put_out(1, 0, (), "stop", n).stop_token_id, U32_MAX),
    "logprobs token": Field(lambda n: scored(token_id=n).token_id, U32_MAX),
    "logprobs rank": Field(lambda n: scored(rank=n).rank, U32_MAX, 1),
    "logprobs candidate": Field(lambda n: scored(top_ids=(n,)).top_ids[0], U32_MAX),
    "dead rank": Field(lambda n: from_head(Dead("x", n)).rank, U32_MAX),
}


@pytest.mark.parametrize("codec", ["compiled", "plain Python"])
@pytest.mark.parametrize("name", FIELDS)
def test_an_integer_arrives_exactly_or_is_refused(name: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if codec == "plain Python":
        monkeypatch.setattr(fields.msgpack, "unpackb", fallback.unpackb)
        monkeypatch.setattr(fields.msgpack, "packb", fallback_packb)
    field = FIELDS[name]
    for number in (*EDGES, *BEYOND_I32, field.least, field.largest, field.largest + 1, field.least - 1):
        if field.least <= number <= field.largest:
            assert field.there(number) == (number if number >= 0 or "priority" in name else 0)  # -1 is 0 for top_k
        else:
            with pytest.raises(REFUSED):
                field.there(number)


@pytest.mark.parametrize("name", FIELDS)
def test_what_is_no_integer_is_refused(name: str) -> None:
    for value in (*NO_INTEGERS, "x", b"\1\0\0\0", [1], 0.0):
        if value == -1 and FIELDS[name].least == -1:
            continue  # top_k may be -1
        if value == -1 and "priority" in name:
            continue
        with pytest.raises(REFUSED):
            FIELDS[name].there(value)


def fallback_packb(values: Any, **options: Any) -> bytes:
    return bytes(fallback.Packer(**options).pack(values))


def test_the_bytes_of_a_number_that_other_codecs_read_as_negative() -> None:
    data = encode(Submit(1, (5,), TokenParams(seed=4026531840)))
    assert b"\xa4seed\xce\xf0\0\0\0" in data
    assert submitted(seed=72057594051091511).params.seed == 72057594051091511
    assert msgpack.unpackb(data)["params"]["seed"] == 4026531840
