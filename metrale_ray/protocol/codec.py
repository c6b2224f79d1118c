# SPDX-License-Identifier: MIT OR Apache-2.0
"""Commands, replies and the handshake as bytes, and back.

Rules: one msgpack map per frame; `kind` says which message it is. Everything is checked before packing and after
unpacking (see `fields`), so that a value which does not fit is refused on the side that has it. What a head cannot
pack is CommandRefused, with the slot at fault where one is; everything else that is wrong is FrameError.

What is left out: whether a message may come now (`session`), and the fields of each command (`command_body`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from metrale_ray.errors import CommandRefused, FrameError
from metrale_ray.protocol.command_body import read_body, write_body
from metrale_ray.protocol.commands import (
    WITNESSES,
    Cmd,
    Command,
    CommandFrame,
    Envelope,
    FreeSlot,
    Hello,
    Progress,
    Rank,
    Reply,
    ReplyError,
    Settled,
    Slot,
    Span,
    Status,
    Timing,
    Welcome,
    command_rows,
)
from metrale_ray.protocol.fields import (
    Fields,
    check_text,
    check_u32,
    check_u64,
    cut_text,
    pack_frame,
    pack_u32s,
    unpack_frame,
)
from metrale_ray.protocol.limits import (
    DIGEST_BYTES,
    MAX_BLOCKS,
    MAX_CODE_CHARS,
    MAX_ERROR_CHARS,
    MAX_KEY_CHARS,
    MAX_MAP_ENTRIES,
    MAX_REFUSAL_CHARS,
    MAX_ROWS,
    MAX_TOKENS,
    MAX_VALUE_CHARS,
)
from metrale_ray.protocol.versions import ProtocolVersion

Known = TypeVar("Known")

COMMAND, REPLY, HELLO, WELCOME = "command", "reply", "hello", "welcome"

_VERSIONS = {int(version): version for version in ProtocolVersion}
_CMDS = {int(cmd): cmd for cmd in Cmd}
_STATUSES = {int(status): status for status in Status}
_FAILURES = (Status.FAILED, Status.REFUSED, Status.POISONED)


def encode_command(envelope: Envelope, command: Command) -> bytes:
    """One frame. Raises CommandRefused when the command does not exist in this version or a value does not fit."""
    version = _VERSIONS.get(envelope.version)
    if version is None:
        raise CommandRefused(f"protocol version {envelope.version} is unknown; known are {_known(_VERSIONS)}")
    try:
        values = _head_of(COMMAND, version, envelope.epoch)
        values["seq"] = check_u64("seq", envelope.seq)
        values["cmd"] = int(command.code)
        values["settled"] = _settled_values(envelope.settled)
        write_body(command, version, values)
        return pack_frame(values)
    except FrameError as error:
        raise CommandRefused(f"{command.code.name}: {error.message}", slots=_slots_at_fault(command)) from error


def decode_command(data: bytes, rank: int | None = None) -> CommandFrame:
    """The command in `data`, which `rank` sent. Raises FrameError."""
    fields = _unpack(data, rank, COMMAND)
    version = _one_of(fields, "v", "protocol version", _VERSIONS)
    cmd = _one_of(fields, "cmd", "command", _CMDS)
    envelope = Envelope(version, fields.u32("epoch"), fields.u64("seq"), _read_settled(fields))
    return CommandFrame(envelope, read_body(cmd, version, fields), data)


def encode_reply(reply: Reply) -> bytes:
    """One frame; an error's text longer than MAX_ERROR_CHARS is cut. Raises FrameError when a value does not fit."""
    values = _head_of(REPLY, _one_version(reply.version), reply.epoch)
    values["seq"] = check_u64("seq", reply.seq)
    values["cmd"] = check_u32("cmd", reply.cmd)
    values["rank"] = check_u32("rank", reply.rank)
    values["status"] = check_u32("status", Status(reply.status))
    values["digest"] = _checked_digest("digest", reply.digest)
    values["error"] = _error_values(reply.error)
    timing, progress = reply.timing, reply.progress
    values["timing"] = [check_u64("timing", us) for us in (timing.received_us, timing.computed_us, timing.waited_us)]
    values["progress"] = progress and [check_u64("progress", n) for n in (progress.done_bytes, progress.total_bytes)]
    if reply.witness:
        values["witness"] = _witness_values(reply.witness)
    if wrong := _misfit(reply.status, reply.error, reply.progress):
        raise FrameError(wrong)
    return pack_frame(values)


def decode_reply(data: bytes, rank: int | None = None) -> Reply:
    """The reply in `data`, which `rank` sent. Raises FrameError."""
    fields = _unpack(data, rank, REPLY)
    reply = Reply(
        version=_one_of(fields, "v", "protocol version", _VERSIONS),
        epoch=fields.u32("epoch"),
        seq=fields.u64("seq"),
        cmd=_one_of(fields, "cmd", "command", _CMDS),
        rank=Rank(fields.u32("rank")),
        status=_one_of(fields, "status", "status", _STATUSES),
        digest=fields.raw("digest", DIGEST_BYTES),
        error=_read_error(fields),
        timing=_read_timing(fields),
        progress=_read_progress(fields),
        witness=_read_witness(fields),
    )
    if wrong := _misfit(reply.status, reply.error, reply.progress):
        raise fields.error(wrong)
    return reply


def encode_hello(hello: Hello) -> bytes:
    """One frame. Raises FrameError when a value does not fit."""
    return pack_frame(
        {
            "kind": HELLO,
            "v": check_u32("v", hello.version),
            "rank": check_u32("rank", hello.rank),
            "must_equal": _checked_texts("must_equal", hello.must_equal),
            "told": _checked_texts("told", hello.told),
            "num_blocks": check_u32("num_blocks", hello.num_blocks),
        }
    )


def decode_hello(data: bytes, rank: int | None = None) -> Hello:
    """The hello in `data`. Any version number is read: the handshake compares it. Raises FrameError."""
    fields = _unpack(data, rank, HELLO)
    return Hello(
        rank=Rank(fields.u32("rank")),
        version=fields.u32("v"),
        must_equal=fields.texts("must_equal", MAX_MAP_ENTRIES, MAX_KEY_CHARS, MAX_VALUE_CHARS),
        told=fields.texts("told", MAX_MAP_ENTRIES, MAX_KEY_CHARS, MAX_VALUE_CHARS),
        num_blocks=fields.u32("num_blocks"),
    )


def encode_welcome(welcome: Welcome) -> bytes:
    """One frame; a refusal longer than MAX_REFUSAL_CHARS is cut. Raises FrameError when a value does not fit."""
    values = {"kind": WELCOME, "v": check_u32("v", welcome.version), "epoch": check_u32("epoch", welcome.epoch)}
    return pack_frame({**values, "refusal": cut_text(welcome.refusal, MAX_REFUSAL_CHARS)})


def decode_welcome(data: bytes, rank: int | None = None) -> Welcome:
    """The welcome in `data`. Any version number is read: the handshake compares it. Raises FrameError."""
    fields = _unpack(data, rank, WELCOME)
    return Welcome(fields.u32("v"), fields.u32("epoch"), fields.text("refusal", MAX_REFUSAL_CHARS))


def _head_of(kind: str, version: ProtocolVersion, epoch: int) -> dict[str, Any]:
    return {"kind": kind, "v": int(version), "epoch": check_u32("epoch", epoch)}


def _one_version(number: int) -> ProtocolVersion:
    if number not in _VERSIONS:
        raise FrameError(f"protocol version {number} is unknown; known are {_known(_VERSIONS)}")
    return _VERSIONS[number]


def _unpack(data: bytes, rank: int | None, kind: str) -> Fields:
    fields = unpack_frame(data, rank)
    found = fields.text("kind", MAX_KEY_CHARS)
    if found != kind:
        raise fields.error(f"kind is {found[:MAX_CODE_CHARS]!r}; expected {kind!r}")
    return fields


def _one_of(fields: Fields, key: str, noun: str, known: dict[int, Known]) -> Known:
    number = fields.u32(key)
    if number not in known:
        raise fields.error(f"unknown {noun} {number}; known are {_known(known)}")
    return known[number]


def _known(known: dict[int, Any]) -> str:
    return ", ".join(map(str, known))


def _settled_values(settled: Settled | None) -> list[Any] | None:
    if settled is None:
        return None
    if type(settled.ok) is not bool:
        raise FrameError(f"settled.ok must be true or false, not {type(settled.ok).__name__}")
    return [check_u64("settled.seq", settled.seq), settled.ok]


def _read_settled(fields: Fields) -> Settled | None:
    if fields.is_absent("settled"):
        return None
    pair = fields.items("settled", ("settled.seq", "settled.ok"))
    return Settled(pair.u64("settled.seq"), pair.flag("settled.ok"))


def _slots_at_fault(command: Command) -> list[Slot] | None:
    """The slots whose rows hold a value that does not fit, or None when it is not a row's."""
    if isinstance(command, FreeSlot):
        return [command.slot]
    return [row.slot for row in command_rows(command) if not _fits(row)] or None


def _fits(row: Span) -> bool:
    try:
        pack_u32s("row", (row.slot, row.start, *row.token_ids, *row.new_blocks, row.logits), MAX_TOKENS + MAX_BLOCKS)
    except FrameError:
        return False
    return True


def _error_values(error: ReplyError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    slots = None if error.slots is None else pack_u32s("error.slots", error.slots, MAX_ROWS)
    return {
        "code": check_text("error.code", error.code, MAX_CODE_CHARS),
        "message": cut_text(error.message, MAX_ERROR_CHARS),
        "slots": slots,
    }


def _read_error(fields: Fields) -> ReplyError | None:
    if fields.is_absent("error"):
        return None
    error = fields.fields("error")
    slots = None if error.is_absent("slots") else tuple(map(Slot, error.u32s("slots", MAX_ROWS)))
    return ReplyError(error.text("code", MAX_CODE_CHARS), error.text("message", MAX_ERROR_CHARS), slots)


def _read_timing(fields: Fields) -> Timing:
    names = ("received_us", "computed_us", "waited_us")
    timing = fields.items("timing", names)
    return Timing(*map(timing.u64, names))


def _read_progress(fields: Fields) -> Progress | None:
    if fields.is_absent("progress"):
        return None
    names = ("done_bytes", "total_bytes")
    progress = fields.items("progress", names)
    return Progress(*map(progress.u64, names))


def _checked_digest(name: str, value: bytes) -> bytes:
    if type(value) is not bytes or len(value) != DIGEST_BYTES:
        raise FrameError(f"{name} must be {DIGEST_BYTES} bytes")
    return value


def _witness_values(witness: Mapping[str, bytes]) -> dict[str, bytes]:
    """The witness in the order of the table, whatever order it was made in."""
    if unknown := witness.keys() - set(WITNESSES):
        raise FrameError(f"a witness of {min(unknown)!r} is unknown; known are {', '.join(WITNESSES)}")
    return {name: _checked_digest(f"witness.{name}", witness[name]) for name in WITNESSES if name in witness}


def _read_witness(fields: Fields) -> dict[str, bytes]:
    """What is known of the witness; a name that is not known here is another build's, and is left out."""
    if fields.is_absent("witness"):
        return {}
    witness = fields.fields("witness")
    return {name: witness.raw(name, DIGEST_BYTES) for name in WITNESSES if name in witness}


def _misfit(status: Status, error: ReplyError | None, progress: Progress | None) -> str | None:
    """What contradicts the status, or None: a failure has an error, PROGRESS has progress, and nothing else has."""
    if (error is not None) != (status in _FAILURES):
        return f"status {status.name} must come {'with' if status in _FAILURES else 'without'} an error"
    if (progress is not None) != (status is Status.PROGRESS):
        return f"status {status.name} must come {'with' if status is Status.PROGRESS else 'without'} progress"
    return None


def _checked_texts(name: str, entries: dict[str, str]) -> dict[str, str]:
    if len(entries) > MAX_MAP_ENTRIES:
        raise FrameError(f"{name} has {len(entries)} entries; allowed are {MAX_MAP_ENTRIES}")
    for key, value in entries.items():
        check_text(f"the name of an entry of {name}", key, MAX_KEY_CHARS)
        check_text(f"{name}[{key!r}]", value, MAX_VALUE_CHARS)
    return entries
