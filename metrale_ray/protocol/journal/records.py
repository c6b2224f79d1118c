# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a journal holds, as plain frozen values: one record for each thing that the head did, heard or decided.

Rules: a record says all of one event, in plain numbers, texts and bytes, so that it can be read by another build. The
first record of an engine's life is `Started`; the first one of every later segment is a `Snapshot`, from which what
follows can be run again when the segments before it are gone. `at_us` is microseconds since `Started`, on the head's
monotonic clock. A journal without clients' content (`redaction`) has the same records with those fields empty.

What is left out: bytes (`record_codec`), files (`segments`, `writer`, `reader`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

JOURNAL_FORMAT = 1
"""Grows when a record's meaning changes. New fields and new records do not change it: readers pass over them."""

Outcome = Literal["ok", "rejected", "failed", "poisoned", "lost", "desync"]
EndReason = Literal["stop", "length", "abort", "error"]
Setting = str | int | float | bool | None


def probes(vocab_size: int) -> range:
    """The token ids whose raw logits are noted at each choice: four, evenly spread over the vocabulary."""
    return range(0, vocab_size, max(1, vocab_size // 4))[:4]


@dataclass(frozen=True, slots=True)
class Started:
    """The engine is ready. All that another process needs to build the same ranks, but the checkpoint itself.

    `wall_time_s` is seconds since 1970. `package` is the version of metrale_ray, `version` the protocol's. `config` is
    the resolved EngineConfig without its faults, `must_equal` what rank 0's Hello says of itself, and `ranks` what
    each rank's Hello tells, in rank order.
    """

    format: int
    wall_time_s: float
    package: str
    epoch: int
    version: int
    redacted: bool
    config: Mapping[str, Setting]
    must_equal: Mapping[str, str]
    ranks: tuple[Mapping[str, str], ...]
    num_blocks: int
    seed: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Admitted:
    """The engine took a client's request. There is one for each request, with one request id for each sequence.

    `front` and `number` say whose it is, 0 and 0 where there is no front. `prompt_token_ids` is None when redacted, and
    `params`, a map of the TokenParams as they go over the wire, is empty then. `deadline_s` counts from the arrival.
    """

    at_us: int
    request_ids: tuple[int, ...]
    front: int
    number: int
    prompt_token_ids: tuple[int, ...] | None
    num_prompt_tokens: int
    params: Mapping[str, Any]
    seed: int
    priority: int
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine refused a client's request, with the error's code and message."""

    at_us: int
    front: int
    number: int
    code: str
    message: str


class RowNote(NamedTuple):
    """Whose row of a command it is, and which tokens of it. A tuple, because each step makes one for each row.

    `_make` takes half the time of naming the fields.
    """

    request_id: int
    slot: int
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Commanded:
    """A command was sent to every rank. `data` is the frame's very bytes, None when redacted. `cmd` is its code."""

    at_us: int
    epoch: int
    seq: int
    cmd: int
    rows: tuple[RowNote, ...]
    data: bytes | None


class ErrorNote(NamedTuple):
    """A rank's error: its code, its message, and the slots that it blames (None: unknown)."""

    code: str
    message: str
    slots: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """One rank's answer. `status` is a commands.Status, `digest` 8 bytes, `witness` 8 bytes by name.

    Times in microseconds: computing, waiting inside collectives, and how much later than the first answer it came.
    """

    rank: int
    status: int
    digest: bytes
    witness: Mapping[str, bytes]
    computed_us: int
    waited_us: int
    lag_us: int
    error: ErrorNote | None


@dataclass(frozen=True, slots=True)
class Answered:
    """What all answers to command number `seq` say together, and those that came. `rank`: who is at fault, if known."""

    at_us: int
    seq: int
    kind: Outcome
    rank: int | None
    message: str
    answers: tuple[RankAnswer, ...]


class TokenNote(NamedTuple):
    """The token chosen for a sequence, and raw logits: of the token, then of the `probes`.

    `token_id` is None and `values` is empty when redacted.
    """

    request_id: int
    token_id: int | None
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens chosen after command number `seq`."""

    at_us: int
    seq: int
    tokens: tuple[TokenNote, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence has ended; `code` and `message` are of the error where that is the reason, else empty."""

    at_us: int
    request_id: int
    reason: EndReason
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class LiveNote:
    """A sequence that has not ended. `slot` is None while it waits; `length` is what the ranks have settled of it.

    `tokens` are of the prompt, then the generated ones; empty when redacted.
    """

    request_id: int
    slot: int | None
    length: int
    block_table: tuple[int, ...]
    tokens: tuple[int, ...]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that lives between two commands: `seq` is the last command's number, `settled_ok` whether it succeeded."""

    at_us: int
    seq: int
    settled_ok: bool
    started: Started
    admitted: tuple[Admitted, ...]
    live: tuple[LiveNote, ...]


@dataclass(frozen=True, slots=True)
class Gap:
    """`num_records` records were let go here. 0: nobody knows how many, because whole segments are missing."""

    at_us: int
    num_records: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The engine has ended. `failure` says of what, where it did not end by itself."""

    at_us: int
    reason: str
    failure: str | None


@dataclass(frozen=True, slots=True)
class Unknown:
    """A record that this build does not know, from a journal of a later one. Only readers meet it."""

    kind: str


Record = Started | Snapshot | Admitted | Refused | Commanded | Answered | Sampled | Ended | Gap | Closed
ReadRecord = Record | Unknown
