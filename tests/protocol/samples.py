# SPDX-License-Identifier: MIT OR Apache-2.0
"""Messages of every kind for the protocol's tests: fixed ones for the golden files, and hypothesis strategies."""

from __future__ import annotations

from hypothesis import strategies as st

from metrale_ray.protocol.codec import (
    decode_command,
    decode_hello,
    decode_reply,
    decode_welcome,
    encode_command,
    encode_hello,
    encode_reply,
    encode_welcome,
)
from metrale_ray.protocol.commands import (
    WITNESSES,
    BlockId,
    Cmd,
    Command,
    CommandFrame,
    Decode,
    DecodeBatch,
    Envelope,
    FreeSlot,
    Hello,
    Load,
    Logits,
    MixedStep,
    Ping,
    PrefillChunk,
    Progress,
    Rank,
    Reply,
    ReplyError,
    Scrub,
    Settled,
    Shutdown,
    Slot,
    Span,
    Status,
    Timing,
    Welcome,
)

U32_MAX, U64_MAX = 2**32 - 1, 2**64 - 1
# Where the integers of msgpack change their form, and those that other codecs got wrong.
EDGES = (0, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 4026531840, 2**32 - 1, 2**32)
EDGES += (72057594051091511, 2**63 - 1, 2**63, 2**64 - 1)
NO_INTEGERS = (2**64, -1, -(2**63) - 1, True, 1.0)

DIGEST = bytes(range(8))


def row(slot: int = 0, start: int = 0, tokens: tuple[int, ...] = (5,), blocks: tuple[int, ...] = ()) -> Span:
    return Span(Slot(slot), start, tokens, tuple(map(BlockId, blocks)), Logits.LAST)


def envelope(version: int, seq: int = 2) -> Envelope:
    return Envelope(version, 1, seq, Settled(seq - 1, True) if seq > 1 else None)


def frame(version: int, command: Command, seq: int = 2) -> CommandFrame:
    place = envelope(version, seq)
    return CommandFrame(place, command, encode_command(place, command))


SINGLE_SLOT: dict[str, Command] = {
    "load": Load(4096),
    "decode": Decode(row(0, 70000, (128000,), (9, 70001))),
    "prefill_chunk": PrefillChunk(Span(Slot(0), 256, (1, 200, 70000, U32_MAX), (BlockId(3),), Logits.NONE)),
    "free_slot": FreeSlot(Slot(0)),
    "ping": Ping(),
    "shutdown": Shutdown(),
}
MANY_SLOTS: dict[str, Command] = {
    "decode_slot_7": Decode(row(7, 12, (42,))),
    "prefill_chunk_slot_300": PrefillChunk(Span(Slot(300), 0, (1, 2, 3), (BlockId(0), BlockId(1)), Logits.ALL)),
    "free_slot_31": FreeSlot(Slot(31)),
    "decode_batch": DecodeBatch((row(3, 100, (5,), (77,)), row(0, 65536, (U32_MAX,)), row(9, 0, (0,)))),
    "mixed_step": MixedStep((row(2, 40, (11,)), Span(Slot(5), 0, (1, 2, 3), (BlockId(8),), Logits.NONE))),
    "scrub": Scrub(0, 1),
    "scrub_slot_7": Scrub(70000, U32_MAX, Slot(7), 1024),
}
COMMANDS = {1: SINGLE_SLOT, 2: SINGLE_SLOT | MANY_SLOTS}


def reply(version: int = 2, **fields: object) -> Reply:
    values: dict[str, object] = {"seq": 2, "cmd": Cmd.PING, "rank": Rank(1), "status": Status.OK, "digest": DIGEST}
    return Reply(version, 1, **(values | fields))  # type: ignore[arg-type]


def replies(version: int) -> dict[str, Reply]:
    error = ReplyError("command_failed", "out of memory: é", (Slot(3), Slot(70000)))
    return {
        "ok": reply(version, cmd=Cmd.DECODE, timing=Timing(U64_MAX, 1500, 20)),
        "failed": reply(version, cmd=Cmd.DECODE, status=Status.FAILED, error=error),
        "refused": reply(version, status=Status.REFUSED, error=ReplyError("command_refused", "slot 9", ())),
        "poisoned": reply(version, status=Status.POISONED, error=ReplyError("slot_poisoned", "unknown")),
        "progress": reply(version, cmd=Cmd.LOAD, status=Status.PROGRESS, progress=Progress(2**33, 2**40)),
        "witness": reply(version, cmd=Cmd.DECODE, witness={name: name.encode().rjust(8) for name in WITNESSES}),
        "failed_witness": reply(
            version, cmd=Cmd.DECODE, status=Status.FAILED, error=error, witness={"command": DIGEST, "tokens": DIGEST}
        ),
    }


def hello(version: int) -> Hello:
    return Hello(Rank(1), version, {"build": "0.1.0", "dtype": "float32"}, {"host": "node-1"}, 4096)


def golden_messages(version: int) -> dict[str, Command | Reply | Hello | Welcome]:
    """Every message that a golden file is kept of, by the file's name."""
    messages: dict[str, Command | Reply | Hello | Welcome] = {f"command-{n}": c for n, c in COMMANDS[version].items()}
    messages |= {f"reply-{n}": r for n, r in replies(version).items()}
    messages["hello"] = hello(version)
    messages["welcome"] = Welcome(version, 3, "")
    messages["welcome-refusal"] = Welcome(version, 3, "dtype: float32 and bfloat16")
    return messages


def to_bytes(message: Command | Reply | Hello | Welcome, version: int) -> bytes:
    match message:
        case Reply():
            return encode_reply(message)
        case Hello():
            return encode_hello(message)
        case Welcome():
            return encode_welcome(message)
        case _:
            return encode_command(envelope(version), message)


def from_bytes(data: bytes, name: str) -> Command | Reply | Hello | Welcome:
    """The message in `data`, whose kind is the first word of `name`."""
    kind = name.partition("-")[0]
    if kind == "command":
        return decode_command(data).command
    return {"reply": decode_reply, "hello": decode_hello, "welcome": decode_welcome}[kind](data)


u32 = st.integers(0, U32_MAX)
u64 = st.integers(0, U64_MAX)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


def spans(slots: st.SearchStrategy[int], tokens: st.SearchStrategy[tuple[int, ...]]) -> st.SearchStrategy[Span]:
    blocks = st.lists(u32, max_size=4).map(tuple)
    return st.builds(Span, slots, u32, tokens, blocks, st.sampled_from(Logits))


one_token = u32.map(lambda token: (token,))
some_tokens = st.lists(u32, min_size=1, max_size=9).map(tuple)


@st.composite
def _scrub(draw: st.DrawFn) -> Scrub:
    num_parts = draw(st.integers(1, U32_MAX))
    part, slot = draw(st.integers(0, num_parts - 1)), draw(st.none() | u32)
    return Scrub(part, num_parts, slot, 0 if slot is None else draw(u32))  # type: ignore[arg-type]


scrubs = _scrub()


def commands(version: int) -> st.SearchStrategy[Command]:
    slots = st.just(0) if version == 1 else u32
    single = [
        st.builds(Load, u32),
        st.builds(Decode, spans(slots, one_token)),
        st.builds(PrefillChunk, spans(slots, some_tokens)),
        st.builds(FreeSlot, slots),
        st.just(Ping()),
        st.just(Shutdown()),
    ]
    if version == 1:
        return st.one_of(*single)
    return st.one_of(
        *single,
        st.builds(DecodeBatch, st.lists(spans(slots, one_token), min_size=1, max_size=40).map(tuple)),
        st.builds(MixedStep, st.lists(spans(slots, some_tokens), min_size=1, max_size=9).map(tuple)),
        scrubs,
    )


def envelopes(version: int) -> st.SearchStrategy[Envelope]:
    return st.builds(Envelope, st.just(version), u32, u64, st.none() | st.builds(Settled, u64, st.booleans()))


errors = st.builds(ReplyError, texts, texts, st.none() | st.lists(u32, max_size=4).map(tuple))
timings = st.builds(Timing, u64, u64, u64)
witnesses = st.dictionaries(st.sampled_from(WITNESSES), st.binary(min_size=8, max_size=8))


@st.composite
def any_reply(draw: st.DrawFn) -> Reply:
    status = draw(st.sampled_from(Status))
    failed = status in (Status.FAILED, Status.REFUSED, Status.POISONED)
    return Reply(
        version=draw(st.sampled_from((1, 2))),
        epoch=draw(u32),
        seq=draw(u64),
        cmd=draw(st.sampled_from(Cmd)),
        rank=Rank(draw(u32)),
        status=status,
        digest=draw(st.binary(min_size=8, max_size=8)),
        error=draw(errors) if failed else None,
        timing=draw(timings),
        progress=draw(st.builds(Progress, u64, u64)) if status is Status.PROGRESS else None,
        witness=draw(witnesses),
    )


entries = st.dictionaries(texts, texts, max_size=5)
hellos = st.builds(Hello, u32, u32, entries, entries, u32)
welcomes = st.builds(Welcome, u32, u32, texts)
