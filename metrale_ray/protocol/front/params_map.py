# SPDX-License-Identifier: MIT OR Apache-2.0
"""TokenParams as one map inside a frame.

Rules: they travel whole, each field by its own name, and are made anew on arrival, so checked anew. One table says
how each field is packed and read; a field that is not in it is an error, so none can be forgotten. Whatever is wrong
raises FrameError. They may be half a megabyte, and one call may send them with hundreds of prompts: a front packs them
once, and the head makes those that come several times in a row once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from metrale_ray.errors import RequestError
from metrale_ray.protocol.fields import Fields, Packed, pack_f64s, pack_u32s, pack_value
from metrale_ray.sampling.token_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_SEQUENCE_TOKENS,
    MAX_BAD_SEQUENCES,
    MAX_END_TOKEN_IDS,
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    TokenParams,
)

_MAX_BAD_TOKENS = MAX_BAD_SEQUENCES * MAX_BAD_SEQUENCE_TOKENS


class _Kind(Protocol):
    """How one kind of field is packed, given its name and its value, and read, given its map and its name."""

    def pack(self, name: str, value: Any, /) -> Any: ...

    def read(self, fields: Fields, name: str, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Way:
    """A kind that two functions make."""

    pack: Callable[[str, Any], Any]
    read: Callable[[Fields, str], Any]


def params_to_map(params: TokenParams) -> dict[str, Any]:
    """The map of `params`; what a subclass adds stays behind."""
    return {name: way.pack(name, getattr(params, name)) for name, way in WAYS.items()}


def read_params(fields: Fields) -> TokenParams:
    """The parameters that such a map holds."""
    values = {name: way.read(fields, name) for name, way in WAYS.items()}
    try:
        return TokenParams(**values)
    except RequestError as error:
        raise fields.error(f"params: {error.message}") from error


class PackedParams:
    """`params` packed once, for any number of requests. Raises FrameError for what cannot be sent."""

    __slots__ = ("packed", "params")

    def __init__(self, params: TokenParams) -> None:
        self.params = params
        self.packed: Packed = pack_value(params_to_map(params))

    @property
    def num_bytes(self) -> int:
        """What they take of each frame."""
        return len(self.packed.data)

    def largest_field(self) -> str:
        """The name of the one that takes most of it."""
        values = params_to_map(self.params)
        return max(values, key=lambda name: len(pack_value(values[name]).data))


class ParamsReader:
    """Reads the maps of TokenParams that come after one another: one that is the last one again is that object again.

    So what is derived from parameters, and kept with them, is shared too.
    """

    def __init__(self) -> None:
        self._data = b""
        self._params: TokenParams | None = None

    def read(self, fields: Fields) -> TokenParams:
        """As `read_params`."""
        data = fields.packed()  # bytes, as 1 and 1.0 and true are equal otherwise
        if self._params is None or data != self._data:
            self._params, self._data = read_params(fields), data
        return self._params


def _as_it_is(name: str, value: Any) -> Any:
    """For numbers and flags, which TokenParams has checked."""
    return value


class _OrNil:
    """A field that may be absent."""

    def __init__(self, kind: _Kind) -> None:
        self._kind = kind

    def pack(self, name: str, value: Any, /) -> Any:
        return None if value is None else self._kind.pack(name, value)

    def read(self, fields: Fields, name: str, /) -> Any:
        return None if fields.is_absent(name) else self._kind.read(fields, name)


class _TokenIds:
    """Up to `max_count` token ids."""

    def __init__(self, max_count: int) -> None:
        self._max_count = max_count

    def pack(self, name: str, value: Any, /) -> Any:
        return pack_u32s(name, value, self._max_count)

    def read(self, fields: Fields, name: str, /) -> Any:
        return fields.u32s(name, self._max_count)


def _read_grammar(fields: Fields, name: str) -> str:
    return fields.text(name, MAX_GRAMMAR_CHARS)


def _pack_biases(name: str, biases: tuple[tuple[int, float], ...]) -> dict[str, bytes]:
    return {
        "token_ids": pack_u32s(f"{name} token_ids", [token_id for token_id, _ in biases], MAX_LOGIT_BIASES),
        "biases": pack_f64s(f"{name} biases", [bias for _, bias in biases], MAX_LOGIT_BIASES),
    }


def _read_biases(fields: Fields, name: str) -> tuple[tuple[int, float], ...]:
    biases = fields.fields(name)
    token_ids = biases.u32s("token_ids", MAX_LOGIT_BIASES)
    return tuple(zip(token_ids, biases.f64s("biases", MAX_LOGIT_BIASES, len(token_ids)), strict=True))


def _pack_sequences(name: str, sequences: tuple[tuple[int, ...], ...]) -> dict[str, bytes]:
    token_ids = [token_id for sequence in sequences for token_id in sequence]
    return {
        "lengths": pack_u32s(f"{name} lengths", [len(sequence) for sequence in sequences], MAX_BAD_SEQUENCES),
        "token_ids": pack_u32s(f"{name} token_ids", token_ids, _MAX_BAD_TOKENS),
    }


def _read_sequences(fields: Fields, name: str) -> tuple[tuple[int, ...], ...]:
    packed = fields.fields(name)
    lengths = packed.u32s("lengths", MAX_BAD_SEQUENCES)
    token_ids = packed.u32s("token_ids", _MAX_BAD_TOKENS, sum(lengths))
    sequences, start = [], 0
    for length in lengths:
        sequences.append(token_ids[start : start + length])
        start += length
    return tuple(sequences)


_NUMBER = _Way(_as_it_is, Fields.number)
_FLAG = _Way(_as_it_is, Fields.flag)
_U32 = _Way(_as_it_is, Fields.u32)
_U64 = _Way(_as_it_is, Fields.u64)

WAYS: dict[str, _Kind] = {
    "n": _U32,
    "temperature": _NUMBER,
    "top_k": _U32,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "seed": _OrNil(_U64),
    "max_tokens": _OrNil(_U32),
    "min_tokens": _U32,
    "ignore_eos": _FLAG,
    "stop_token_ids": _TokenIds(MAX_STOP_TOKEN_IDS),
    "repetition_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "logit_bias": _Way(_pack_biases, _read_biases),
    "allowed_token_ids": _OrNil(_TokenIds(MAX_ALLOWED_TOKEN_IDS)),
    "bad_token_ids": _Way(_pack_sequences, _read_sequences),
    "end_token_ids": _TokenIds(MAX_END_TOKEN_IDS),
    "logprobs": _OrNil(_U32),
    "prompt_logprobs": _OrNil(_U32),
    "grammar": _OrNil(_Way(_as_it_is, _read_grammar)),
}
"""How each field of TokenParams travels, by its name."""
