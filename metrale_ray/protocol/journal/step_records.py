# SPDX-License-Identifier: MIT OR Apache-2.0
"""The records of a step as maps, and back: the command, the answers, the tokens chosen. See `record_codec`.

Rules: what a step has many of (rows, answers, tokens) is an array of its fields in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from metrale_ray.protocol.fields import Fields
from metrale_ray.protocol.journal.record_fields import (
    MAX_LIST,
    MAX_RANKS,
    cut_code,
    cut_message,
    named,
    read_code,
    read_message,
    read_tuples,
    read_u64s,
    read_word,
)
from metrale_ray.protocol.journal.records import (
    Answered,
    Commanded,
    ErrorNote,
    Outcome,
    RankAnswer,
    RowNote,
    Sampled,
    TokenNote,
)
from metrale_ray.protocol.limits import DIGEST_BYTES, MAX_FRAME_BYTES, MAX_ROWS

MAX_WITNESSES = 64
"""What one answer gives evidence of: far more than there is."""

MAX_VALUES = 64
"""Raw logits of one choice: far more than there are probes."""

OUTCOMES = ("ok", "rejected", "failed", "poisoned", "lost", "desync")

_ROW = (int, int, int, int, bool)  # the types of a RowNote's fields
_NUM_ROW_FIELDS = len(_ROW)
_ANSWER = ("rank", "status", "digest", "witness", "computed_us", "waited_us", "lag_us", "error")


def write_commanded(record: Commanded) -> dict[str, Any]:
    """The fields of such a record. Raises FrameError for what does not fit."""
    return {
        "at_us": record.at_us,
        "epoch": record.epoch,
        "seq": record.seq,
        "cmd": int(record.cmd),
        "rows": record.rows,
        "data": record.data,
    }


def read_commanded(fields: Fields) -> Commanded:
    """The record of such fields. Raises FrameError."""
    return Commanded(
        at_us=fields.u64("at_us"),
        epoch=fields.u32("epoch"),
        seq=fields.u64("seq"),
        cmd=fields.u32("cmd"),
        rows=tuple(RowNote(*row[:_NUM_ROW_FIELDS]) for row in read_tuples(fields, "rows", MAX_ROWS, _ROW)),
        data=None if fields.is_absent("data") else fields.binary("data", MAX_FRAME_BYTES),
    )


def write_answered(record: Answered) -> dict[str, Any]:
    """The fields of such a record. Raises FrameError for what does not fit."""
    return {
        "at_us": record.at_us,
        "seq": record.seq,
        "outcome": record.kind,
        "rank": record.rank,
        "message": cut_message(record.message),
        "answers": [_answer_values(answer) for answer in record.answers],
    }


def _answer_values(answer: RankAnswer) -> tuple[Any, ...]:
    error = answer.error
    return (
        answer.rank,
        int(answer.status),
        answer.digest,
        answer.witness if type(answer.witness) is dict else dict(answer.witness),
        answer.computed_us,
        answer.waited_us,
        answer.lag_us,
        error and (cut_code(error[0]), cut_message(error[1]), error[2]),
    )


def read_answered(fields: Fields) -> Answered:
    """The record of such fields. Raises FrameError."""
    return Answered(
        at_us=fields.u64("at_us"),
        seq=fields.u64("seq"),
        kind=cast("Outcome", read_word(fields, "outcome", OUTCOMES)),
        rank=None if fields.is_absent("rank") else fields.u32("rank"),
        message=read_message(fields, "message"),
        answers=tuple(_read_answer(fields, values) for values in fields.array("answers", MAX_RANKS)),
    )


def _read_answer(fields: Fields, values: Any) -> RankAnswer:
    answer = named(fields, "answers", values, _ANSWER)
    return RankAnswer(
        rank=answer.u32("rank"),
        status=answer.u32("status"),
        digest=answer.raw("digest", DIGEST_BYTES),
        witness=_read_witness(answer),
        computed_us=answer.u64("computed_us"),
        waited_us=answer.u64("waited_us"),
        lag_us=answer.u64("lag_us"),
        error=_read_error(answer),
    )


def _read_witness(answer: Fields) -> Mapping[str, bytes]:
    values = answer.entries("witness", MAX_WITNESSES)
    for name, value in values.items():
        if type(value) is not bytes or len(value) != DIGEST_BYTES:
            raise answer.error(f"witness[{name!r}] must be {DIGEST_BYTES} bytes")
    return values


def _read_error(answer: Fields) -> ErrorNote | None:
    if answer.is_absent("error"):
        return None
    error = named(answer, "error", answer.array("error", MAX_LIST), ErrorNote._fields)
    slots = None if error.is_absent("slots") else read_u64s(error, "slots", MAX_ROWS)
    return ErrorNote(read_code(error), read_message(error, "message"), slots)


def write_sampled(record: Sampled) -> dict[str, Any]:
    """The fields of such a record. Raises FrameError for what does not fit."""
    return {"at_us": record.at_us, "seq": record.seq, "tokens": record.tokens}


def read_sampled(fields: Fields) -> Sampled:
    """The record of what `write_sampled` gives."""
    tokens = tuple(_read_token(fields, values) for values in fields.array("tokens", MAX_ROWS))
    return Sampled(fields.u64("at_us"), fields.u64("seq"), tokens)


def _read_token(fields: Fields, values: Any) -> TokenNote:
    token = named(fields, "tokens", values, TokenNote._fields)
    token_id = None if token.is_absent("token_id") else token.u32("token_id")
    logits = token.array("values", MAX_VALUES)
    if any(type(logit) is not float for logit in logits):
        raise fields.error("the values of tokens must be floats")
    return TokenNote(token.u64("request_id"), token_id, tuple(logits))
