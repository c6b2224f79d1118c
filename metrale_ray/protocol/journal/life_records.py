# SPDX-License-Identifier: MIT OR Apache-2.0
"""The records of an engine's life as maps, and back: its start and end, its requests, snapshots. See `record_codec`.

Rules: a prompt, and whatever else may be long, is `bin` of little-endian u32, as in frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from metrale_ray.protocol.fields import Fields, pack_u32s
from metrale_ray.protocol.journal.record_fields import (
    MAX_LIST,
    MAX_RANKS,
    cut_code,
    cut_entries,
    cut_message,
    read_code,
    read_entries,
    read_message,
    read_u64s,
    read_word,
)
from metrale_ray.protocol.journal.records import (
    Admitted,
    Closed,
    Ended,
    EndReason,
    Gap,
    LiveNote,
    Refused,
    Setting,
    Snapshot,
    Started,
)
from metrale_ray.protocol.limits import MAX_BLOCKS, MAX_MAP_ENTRIES, MAX_ROWS, MAX_TOKENS, MAX_VALUE_CHARS

END_REASONS = ("stop", "length", "abort", "error")


def write_started(record: Started) -> dict[str, Any]:
    """The fields of such a record. Raises FrameError for what does not fit."""
    return {
        "format": record.format,
        "wall_time_s": record.wall_time_s,
        "package": record.package,
        "epoch": record.epoch,
        "version": record.version,
        "redacted": record.redacted,
        "config": dict(record.config),
        "must_equal": cut_entries(record.must_equal),
        "ranks": [cut_entries(told) for told in record.ranks],
        "num_blocks": record.num_blocks,
        "seed": record.seed,
        "eos_token_ids": list(record.eos_token_ids),
    }


def read_started(fields: Fields) -> Started:
    """The record of such fields. Raises FrameError."""
    return Started(
        format=fields.u32("format"),
        wall_time_s=fields.number("wall_time_s"),
        package=fields.text("package", MAX_VALUE_CHARS),
        epoch=fields.u32("epoch"),
        version=fields.u32("version"),
        redacted=fields.flag("redacted"),
        config=_read_config(fields),
        must_equal=read_entries(fields, "must_equal"),
        ranks=_read_ranks(fields),
        num_blocks=fields.u32("num_blocks"),
        seed=fields.u64("seed"),
        eos_token_ids=read_u64s(fields, "eos_token_ids", MAX_LIST),
    )


def _read_config(fields: Fields) -> Mapping[str, Setting]:
    values = fields.entries("config", MAX_MAP_ENTRIES)
    for name, value in values.items():
        if value is not None and type(value) not in (str, int, float, bool):
            raise fields.error(f"config[{name!r}] must be a text, a number, true, false or nil")
    return cast("Mapping[str, Setting]", values)


def _read_ranks(fields: Fields) -> tuple[Mapping[str, str], ...]:
    each = [Fields({"ranks": told}) for told in fields.array("ranks", MAX_RANKS)]
    return tuple(read_entries(one, "ranks") for one in each)


def write_snapshot(record: Snapshot) -> dict[str, Any]:
    """The fields of such a record. Raises FrameError for what does not fit."""
    return {
        "at_us": record.at_us,
        "seq": record.seq,
        "settled_ok": record.settled_ok,
        "started": write_started(record.started),
        "admitted": [write_admitted(admitted) for admitted in record.admitted],
        "live": [_live_values(live) for live in record.live],
    }


def _live_values(live: LiveNote) -> dict[str, Any]:
    return {
        "request_id": live.request_id,
        "slot": live.slot,
        "length": live.length,
        "block_table": pack_u32s("block_table", live.block_table, MAX_BLOCKS),
        "tokens": pack_u32s("tokens", live.tokens, MAX_TOKENS),
        "num_prompt_tokens": live.num_prompt_tokens,
    }


def read_snapshot(fields: Fields) -> Snapshot:
    """The record of such fields. Raises FrameError."""
    return Snapshot(
        at_us=fields.u64("at_us"),
        seq=fields.u64("seq"),
        settled_ok=fields.flag("settled_ok"),
        started=read_started(fields.fields("started")),
        admitted=tuple(map(read_admitted, fields.fields_list("admitted", MAX_LIST))),
        live=tuple(map(_read_live, fields.fields_list("live", MAX_LIST))),
    )


def _read_live(fields: Fields) -> LiveNote:
    return LiveNote(
        request_id=fields.u64("request_id"),
        slot=None if fields.is_absent("slot") else fields.u32("slot"),
        length=fields.u32("length"),
        block_table=fields.u32s("block_table", MAX_BLOCKS),
        tokens=fields.u32s("tokens", MAX_TOKENS),
        num_prompt_tokens=fields.u32("num_prompt_tokens"),
    )


def write_admitted(record: Admitted) -> dict[str, Any]:
    """The fields of such a record. Raises FrameError for what does not fit."""
    ids = record.prompt_token_ids
    return {
        "at_us": record.at_us,
        "request_ids": record.request_ids,
        "front": record.front,
        "number": record.number,
        "prompt_token_ids": None if ids is None else pack_u32s("prompt_token_ids", ids, MAX_TOKENS),
        "num_prompt_tokens": record.num_prompt_tokens,
        "params": dict(record.params),
        "seed": record.seed,
        "priority": record.priority,
        "deadline_s": record.deadline_s,
    }


def read_admitted(fields: Fields) -> Admitted:
    """The record of such fields. Raises FrameError."""
    is_redacted = fields.is_absent("prompt_token_ids")
    return Admitted(
        at_us=fields.u64("at_us"),
        request_ids=read_u64s(fields, "request_ids", MAX_ROWS),
        front=fields.u64("front"),
        number=fields.u64("number"),
        prompt_token_ids=None if is_redacted else fields.u32s("prompt_token_ids", MAX_TOKENS),
        num_prompt_tokens=fields.u32("num_prompt_tokens"),
        params=fields.entries("params", MAX_MAP_ENTRIES),
        seed=fields.u64("seed"),
        priority=fields.i32("priority"),
        deadline_s=None if fields.is_absent("deadline_s") else fields.number("deadline_s"),
    )


def write_refused(record: Refused) -> dict[str, Any]:
    """The fields of such a record. Raises FrameError for what does not fit."""
    return {
        "at_us": record.at_us,
        "front": record.front,
        "number": record.number,
        "code": cut_code(record.code),
        "message": cut_message(record.message),
    }


def read_refused(fields: Fields) -> Refused:
    """The record of such fields. Raises FrameError."""
    return Refused(
        fields.u64("at_us"),
        fields.u64("front"),
        fields.u64("number"),
        read_code(fields),
        read_message(fields, "message"),
    )


def write_ended(record: Ended) -> dict[str, Any]:
    """The fields of such a record. Raises FrameError for what does not fit."""
    return {
        "at_us": record.at_us,
        "request_id": record.request_id,
        "reason": record.reason,
        "code": cut_code(record.code),
        "message": cut_message(record.message),
    }


def read_ended(fields: Fields) -> Ended:
    """The record of such fields. Raises FrameError."""
    reason = cast("EndReason", read_word(fields, "reason", END_REASONS))
    return Ended(
        fields.u64("at_us"), fields.u64("request_id"), reason, read_code(fields), read_message(fields, "message")
    )


def write_gap(record: Gap) -> dict[str, Any]:
    """The fields of such a record. Raises FrameError for what does not fit."""
    return {"at_us": record.at_us, "num_records": record.num_records}


def read_gap(fields: Fields) -> Gap:
    """The record of such fields. Raises FrameError."""
    return Gap(fields.u64("at_us"), fields.u64("num_records"))


def write_closed(record: Closed) -> dict[str, Any]:
    """The fields of such a record. Raises FrameError for what does not fit."""
    failure = record.failure
    return {
        "at_us": record.at_us,
        "reason": cut_message(record.reason),
        "failure": None if failure is None else cut_message(failure),
    }


def read_closed(fields: Fields) -> Closed:
    """The record of such fields. Raises FrameError."""
    failure = None if fields.is_absent("failure") else read_message(fields, "failure")
    return Closed(fields.u64("at_us"), read_message(fields, "reason"), failure)
