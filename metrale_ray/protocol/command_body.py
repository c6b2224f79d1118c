# SPDX-License-Identifier: MIT OR Apache-2.0
"""The fields of each command, beside its envelope: written, and read back, by one entry of a table each.

Rules: in v1 nothing names a slot, so a command is for slot 0; in v2 a single-slot command carries `seq_id`. The
commands of many rows carry one array per property, in row order; what differs in length per row (tokens, blocks) is one
array of all rows after one another, beside an array of the counts.

What is left out: whether a slot exists or a start is right. Each rank checks that against its own state.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, repeat
from typing import Any, cast

from metrale_ray.errors import CommandRefused, FrameError
from metrale_ray.protocol.commands import (
    BlockId,
    Cmd,
    Command,
    Decode,
    DecodeBatch,
    FreeSlot,
    Load,
    Logits,
    MixedStep,
    Ping,
    PrefillChunk,
    Scrub,
    Shutdown,
    Slot,
    Span,
)
from metrale_ray.protocol.fields import Fields, check_u32, pack_u32s
from metrale_ray.protocol.limits import MAX_BLOCKS, MAX_ROWS, MAX_TOKENS
from metrale_ray.protocol.versions import ProtocolVersion

V1_COMMANDS = frozenset((Cmd.LOAD, Cmd.DECODE, Cmd.PREFILL_CHUNK, Cmd.FREE_SLOT, Cmd.PING, Cmd.SHUTDOWN))
"""All that v1 knows; each is for slot 0."""

ALLOWED = {ProtocolVersion.V1: V1_COMMANDS, ProtocolVersion.V2: frozenset(Cmd)}

_LOGITS = tuple(Logits)  # indexed by the number on the wire
_LOGITS_TYPES = {Logits, int}
_ONLY_SLOT = Slot(0)  # the slot that every v1 command means


def write_body(command: Command, version: ProtocolVersion, values: dict[str, Any]) -> None:
    """Add the command's own fields to `values`, each checked.

    Raises CommandRefused when the version has no such command or slot, FrameError when a value does not fit its field.
    """
    if command.code not in ALLOWED[version]:
        allowed = ", ".join(cmd.name for cmd in sorted(ALLOWED[version]))
        raise CommandRefused(f"protocol {version.label} has no command {command.code.name}; it has {allowed}")
    match command:
        case Load(num_blocks):
            values["num_blocks"] = check_u32("num_blocks", num_blocks)
        case FreeSlot(slot):
            _write_slot(slot, version, values)
        case Decode(row):
            _write_decode(row, version, values)
        case PrefillChunk(row):
            _write_prefill(row, version, values)
        case DecodeBatch(rows):
            _write_rows(rows, values, one_token_each=True)
        case MixedStep(rows):
            _write_rows(rows, values, one_token_each=False)
        case Scrub():
            _write_scrub(command, version, values)
        case Ping() | Shutdown():
            pass


def read_body(cmd: Cmd, version: ProtocolVersion, fields: Fields) -> Command:
    """The command with its own fields. Raises FrameError."""
    if cmd not in ALLOWED[version]:
        raise fields.error(f"protocol {version.label} has no command {cmd.name}")
    if version is ProtocolVersion.V1 and "seq_id" in fields:
        raise fields.error("a v1 command carries no seq_id")
    return _READERS[cmd](fields, version)


def _write_slot(slot: Slot, version: ProtocolVersion, values: dict[str, Any]) -> None:
    number = check_u32("slot", slot)
    if version is not ProtocolVersion.V1:
        values["seq_id"] = number
    elif number != _ONLY_SLOT:
        raise CommandRefused(f"protocol v1 has only slot 0, not slot {number}; use v2", slots=(slot,))


def _write_decode(row: Span, version: ProtocolVersion, values: dict[str, Any]) -> None:
    _write_slot(row.slot, version, values)
    if len(row.token_ids) != 1:
        raise CommandRefused(_one_token(row), slots=(row.slot,))
    values["start"] = check_u32("start", row.start)
    values["token"] = check_u32("token", row.token_ids[0])
    values["blocks"] = pack_u32s("blocks", row.new_blocks, MAX_BLOCKS)
    values["logits"] = int(_checked_logits((row.logits,))[0])


def _write_prefill(row: Span, version: ProtocolVersion, values: dict[str, Any]) -> None:
    _write_slot(row.slot, version, values)
    if not row.token_ids:
        raise CommandRefused(_some_tokens(row), slots=(row.slot,))
    values["start"] = check_u32("start", row.start)
    values["tokens"] = pack_u32s("tokens", row.token_ids, MAX_TOKENS)
    values["blocks"] = pack_u32s("blocks", row.new_blocks, MAX_BLOCKS)
    values["logits"] = int(_checked_logits((row.logits,))[0])


def _write_rows(rows: Sequence[Span], values: dict[str, Any], *, one_token_each: bool) -> None:
    if not rows:
        raise CommandRefused("a command of many rows needs at least one")
    counts = [len(row.token_ids) for row in rows]
    if one_token_each:
        if counts.count(1) != len(counts):
            wrong = next(row for row in rows if len(row.token_ids) != 1)
            raise CommandRefused(_one_token(wrong), slots=(wrong.slot,))
    elif 0 in counts:
        empty = rows[counts.index(0)]
        raise CommandRefused(_some_tokens(empty), slots=(empty.slot,))
    else:
        values["counts"] = pack_u32s("counts", counts, MAX_ROWS)
    values["slots"] = pack_u32s("slots", [row.slot for row in rows], MAX_ROWS)
    values["starts"] = pack_u32s("starts", [row.start for row in rows], MAX_ROWS)
    values["tokens"] = pack_u32s("tokens", [token for row in rows for token in row.token_ids], MAX_TOKENS)
    values["block_counts"] = pack_u32s("block_counts", [len(row.new_blocks) for row in rows], MAX_ROWS)
    values["blocks"] = pack_u32s("blocks", [block for row in rows for block in row.new_blocks], MAX_BLOCKS)
    values["logits"] = struct.pack(f"<{len(rows)}I", *_checked_logits([row.logits for row in rows]))


def _write_scrub(scrub: Scrub, version: ProtocolVersion, values: dict[str, Any]) -> None:
    values["part"] = check_u32("part", scrub.part)
    values["num_parts"] = check_u32("num_parts", scrub.num_parts)
    if scrub.part >= scrub.num_parts:
        raise CommandRefused(_no_such_part(scrub))
    if scrub.slot is not None:
        _write_slot(scrub.slot, version, values)
        values["start"] = check_u32("start", scrub.start)


def _checked_logits(kinds: Sequence[int]) -> Sequence[int]:
    if not set(map(type, kinds)) <= _LOGITS_TYPES or not (min(kinds) >= 0 and max(kinds) < len(_LOGITS)):
        raise FrameError(f"logits must be one of {', '.join(kind.name for kind in _LOGITS)}")
    return kinds


def _one_token(row: Span) -> str:
    return f"a decode row has exactly one token; the row of slot {row.slot} has {len(row.token_ids)}"


def _some_tokens(row: Span) -> str:
    return f"a span has at least one token; the span of slot {row.slot} has none"


def _no_such_part(scrub: Scrub) -> str:
    return f"part {scrub.part} is not below num_parts {scrub.num_parts}"


def _read_load(fields: Fields, version: ProtocolVersion) -> Load:
    return Load(fields.u32("num_blocks"))


def _read_free(fields: Fields, version: ProtocolVersion) -> FreeSlot:
    return FreeSlot(_read_slot(fields, version))


def _read_ping(fields: Fields, version: ProtocolVersion) -> Ping:
    return Ping()


def _read_shutdown(fields: Fields, version: ProtocolVersion) -> Shutdown:
    return Shutdown()


def _read_scrub(fields: Fields, version: ProtocolVersion) -> Scrub:
    slot = None if fields.is_absent("seq_id") else _read_slot(fields, version)
    start = 0 if slot is None else fields.u32("start")
    scrub = Scrub(fields.u32("part"), fields.u32("num_parts"), slot, start)
    if scrub.part >= scrub.num_parts:
        raise fields.error(_no_such_part(scrub))
    return scrub


def _read_decode(fields: Fields, version: ProtocolVersion) -> Decode:
    return Decode(_read_span(fields, version, (fields.u32("token"),)))


def _read_prefill(fields: Fields, version: ProtocolVersion) -> PrefillChunk:
    tokens = fields.u32s("tokens", MAX_TOKENS)
    if not tokens:
        raise fields.error("a span has at least one token")
    return PrefillChunk(_read_span(fields, version, tokens))


def _read_slot(fields: Fields, version: ProtocolVersion) -> Slot:
    return _ONLY_SLOT if version is ProtocolVersion.V1 else Slot(fields.u32("seq_id"))


def _read_span(fields: Fields, version: ProtocolVersion, token_ids: tuple[int, ...]) -> Span:
    return Span(
        slot=_read_slot(fields, version),
        start=fields.u32("start"),
        token_ids=token_ids,
        new_blocks=cast(tuple[BlockId, ...], fields.u32s("blocks", MAX_BLOCKS)),
        logits=_logits(fields.u32("logits"), fields),
    )


def _read_decode_batch(fields: Fields, version: ProtocolVersion) -> DecodeBatch:
    slots = _read_slots(fields)
    tokens = fields.u32s("tokens", MAX_ROWS, len(slots))
    return DecodeBatch(_read_rows(fields, slots, zip(tokens, strict=True)))


def _read_mixed_step(fields: Fields, version: ProtocolVersion) -> MixedStep:
    slots = _read_slots(fields)
    counts = fields.u32s("counts", MAX_ROWS, len(slots))
    if 0 in counts:
        raise fields.error("a span has at least one token")
    return MixedStep(_read_rows(fields, slots, _split(fields, "tokens", MAX_TOKENS, counts)))


def _read_slots(fields: Fields) -> tuple[int, ...]:
    slots = fields.u32s("slots", MAX_ROWS)
    if not slots:
        raise fields.error("a command of many rows needs at least one")
    return slots


def _read_rows(fields: Fields, slots: tuple[int, ...], tokens: Iterable[tuple[int, ...]]) -> tuple[Span, ...]:
    num_rows = len(slots)
    starts = fields.u32s("starts", MAX_ROWS, num_rows)
    blocks = _split(fields, "blocks", MAX_BLOCKS, fields.u32s("block_counts", MAX_ROWS, num_rows))
    logits = fields.u32s("logits", MAX_ROWS, num_rows)
    if max(logits) >= len(_LOGITS):
        raise fields.error(f"logits must be 0 to {len(_LOGITS) - 1}, not {max(logits)}")
    kinds = map(_LOGITS.__getitem__, logits)
    return tuple(map(Span, slots, starts, tokens, blocks, kinds))  # type: ignore[arg-type]  # checked u32 are the ids


def _split(fields: Fields, key: str, max_count: int, counts: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """The array `key`, cut into one tuple per row."""
    values = fields.u32s(key, max_count, sum(counts))
    if not values:
        return repeat((), len(counts))
    rest = iter(values)
    return [tuple(islice(rest, count)) if count else () for count in counts]


def _logits(number: int, fields: Fields) -> Logits:
    if number >= len(_LOGITS):
        raise fields.error(f"logits must be 0 to {len(_LOGITS) - 1}, not {number}")
    return _LOGITS[number]


_READERS: dict[Cmd, Callable[[Fields, ProtocolVersion], Command]] = {
    Cmd.LOAD: _read_load,
    Cmd.DECODE: _read_decode,
    Cmd.DECODE_BATCH: _read_decode_batch,
    Cmd.PREFILL_CHUNK: _read_prefill,
    Cmd.MIXED_STEP: _read_mixed_step,
    Cmd.FREE_SLOT: _read_free,
    Cmd.PING: _read_ping,
    Cmd.SHUTDOWN: _read_shutdown,
    Cmd.SCRUB: _read_scrub,
}
