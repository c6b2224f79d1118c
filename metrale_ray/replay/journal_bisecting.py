# SPDX-License-Identifier: MIT OR Apache-2.0
"""`bisect_journals`: two journals side by side, up to the first command at which they part.

Rules: command number n of one is held against command number n of the other, field by field, in the order in which
things follow from one another: what was ordered, how it ended, what was chosen, and the logits noted with that, which
may differ by the tolerance. Epochs, times, whose request it is and digests (which cover the epoch) may differ.

What is left out: running anything again (`configuration_bisecting`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metrale_ray.errors import FrameError, JournalError
from metrale_ray.protocol.codec import decode_command
from metrale_ray.protocol.commands import Command, command_rows
from metrale_ray.protocol.journal.records import (
    Admitted,
    Answered,
    Closed,
    Commanded,
    Gap,
    ReadRecord,
    Sampled,
    Snapshot,
    TokenNote,
)
from metrale_ray.replay.names import FIELD_NAMES, cmd_name
from metrale_ray.replay.parting import BisectResult, Parting, largest_gap

Differing = tuple[str, str, str, int | None]
"""The name of a field, what A and B have there, and the row that it is of."""

_CARRIED = {
    "slot": "the slot",
    "start": "the start",
    "token_ids": "the token ids",
    "new_blocks": "the new blocks",
    "logits": "the logits asked for",
}
_NOTED = {"slot": "the slot", "start": "the start", "num_tokens": "the number of tokens"}


@dataclass(slots=True)
class Step:
    """What one journal has of one command. `command` is None in a journal without clients' content.

    `is_whole`: something comes behind it, so the journal has all of its tokens. `knows_requests`: whose rows these are,
    and what came of them, is known; a file of a rank's last commands has the commands alone.
    """

    commanded: Commanded
    command: Command | None
    answered: Answered | None = None
    tokens: tuple[TokenNote, ...] = ()
    is_whole: bool = False
    knows_requests: bool = True


def bisect_journals(
    a: Iterable[ReadRecord], b: Iterable[ReadRecord], tolerance: float, on_step: Callable[[], None] = lambda: None
) -> BisectResult:
    """Compare `a` and `b`; `on_step` is called for each command. Raises JournalError for what cannot be read."""
    result = BisectResult(tolerance)
    for step_a, step_b in _pairs(steps(a), steps(b), result):
        on_step()
        result.num_commands += 1
        result.parting = _parting(step_a, step_b, result)
        if result.parting is not None:
            break
    if not result.num_commands:
        result.remarks.append("no command is in both")
    return result


def steps(records: Iterable[ReadRecord]) -> Iterator[Step]:
    """The commands of a journal, each with what follows from it."""
    step: Step | None = None
    knows_requests = False
    for record in records:
        match record:
            case Admitted() | Snapshot():
                knows_requests = True
            case Commanded() | Closed():
                if step is not None:
                    step.is_whole = True
                    yield step
                step = None
                if isinstance(record, Commanded):
                    step = Step(record, _command(record), knows_requests=knows_requests)
            case Gap():
                step = None  # what follows from it may be among what is missing
            case Answered() if step is not None and record.seq == step.commanded.seq:
                step.answered = record
            case Sampled() if step is not None and record.seq == step.commanded.seq:
                step.tokens += record.tokens
    if step is not None:
        yield step


def _command(record: Commanded) -> Command | None:
    if record.data is None:
        return None
    try:
        return decode_command(record.data).command
    except FrameError as error:
        raise JournalError(f"the frame of command {record.seq} cannot be read here: {error.message}") from error


def _pairs(a: Iterator[Step], b: Iterator[Step], result: BisectResult) -> Iterator[tuple[Step, Step]]:
    """Those with the same number; the others, which one of the two does not have, are told."""
    skipped = {"A": 0, "B": 0}
    step_a, step_b = next(a, None), next(b, None)
    while step_a is not None and step_b is not None:
        if step_a.commanded.seq < step_b.commanded.seq:
            skipped["A"] += 1
            step_a = next(a, None)
        elif step_a.commanded.seq > step_b.commanded.seq:
            skipped["B"] += 1
            step_b = next(b, None)
        else:
            yield step_a, step_b
            step_a, step_b = next(a, None), next(b, None)
    for name, number in skipped.items():
        if number:
            commands = "1 command is" if number == 1 else f"{number} commands are"
            result.remarks.append(f"{commands} in {name} alone, at its beginning or in gaps of the other")
    for name, step in (("A", step_a), ("B", step_b)):
        if step is not None:
            result.remarks.append(f"{name} goes on at command {step.commanded.seq}, where the other one has ended")


def _parting(a: Step, b: Step, result: BisectResult) -> Parting | None:
    differing = next(_differences(a, b), None)
    if differing is not None:
        return _make(a, *differing)
    tokens_a, tokens_b = _tokens(a), _tokens(b)
    for row in tokens_a.keys() & tokens_b.keys():
        note = tokens_a[row]
        values_a, values_b = note.values, tokens_b[row].values
        gap = largest_gap(values_a, values_b)
        if result.note_gap(a.commanded.seq, gap, len(values_a)):
            return _make(
                a, f"a logit noted with the token, by {gap:.3g}", _values_text(values_a), _values_text(values_b), row
            )
    return None


def _differences(a: Step, b: Step) -> Iterator[Differing]:
    """What must be equal and is not, causes before effects."""
    yield from _pair("the command", _cmd_name(a), _cmd_name(b))
    yield from _pair("the number of rows", len(a.commanded.rows), len(b.commanded.rows))
    if a.command is None or b.command is None:
        yield from _row_differences(_NOTED, a.commanded.rows, b.commanded.rows)
    elif a.commanded.rows:
        yield from _row_differences(_CARRIED, command_rows(a.command), command_rows(b.command))
    else:
        yield from _pair("what the command carries", a.command, b.command)
    both_know = a.knows_requests and b.knows_requests
    if both_know:
        yield from _row_differences({"samples": "whether a token is chosen"}, a.commanded.rows, b.commanded.rows)
    if a.answered is not None and b.answered is not None:
        if both_know or not a.commanded.rows:
            yield from _pair("the outcome", a.answered.kind, b.answered.kind)
        elif a.command is not None and b.command is not None:
            yield from _witness_differences(a.answered, b.answered)
    if both_know and a.is_whole and b.is_whole:
        yield from _token_differences(_tokens(a), _tokens(b))


def _witness_differences(a: Answered, b: Answered) -> Iterator[Differing]:
    """Of two files of last commands: what each one's own rank had of the command, which an outcome does not tell."""
    if not a.answers or not b.answers:
        return
    mine, other = a.answers[0], b.answers[0]
    for name, words in FIELD_NAMES.items():
        if name in mine.witness and name in other.witness:
            yield from _pair(f"{words} on its rank", mine.witness[name].hex(), other.witness[name].hex())


def _row_differences(names: Mapping[str, str], rows_a: Sequence[Any], rows_b: Sequence[Any]) -> Iterator[Differing]:
    for row, (a, b) in enumerate(zip(rows_a, rows_b, strict=True)):
        for attribute, name in names.items():
            yield from _pair(name, getattr(a, attribute), getattr(b, attribute), row)


def _token_differences(a: Mapping[int, TokenNote], b: Mapping[int, TokenNote]) -> Iterator[Differing]:
    for row in sorted(a.keys() | b.keys()):
        has_a, has_b = (notes[row].token_id if row in notes else "none" for notes in (a, b))
        yield from _pair("the token", has_a, has_b, row)


def _pair(name: str, a: object, b: object, row: int | None = None) -> Iterator[Differing]:
    if a == b:
        return
    if isinstance(a, tuple) and isinstance(b, tuple):
        place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if place is not None:
            yield f"{name}, at place {place}", str(a[place]), str(b[place]), row
        else:
            yield f"the number of {name.removeprefix('the ')}", str(len(a)), str(len(b)), row
        return
    yield name, str(a), str(b), row


def _tokens(step: Step) -> dict[int, TokenNote]:
    """Those chosen, by their rows."""
    rows = {note.request_id: row for row, note in enumerate(step.commanded.rows)}
    return {rows[note.request_id]: note for note in step.tokens if note.request_id in rows}


def _cmd_name(step: Step) -> str:
    return cmd_name(step.commanded.cmd)


def _values_text(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.9g}" for value in values)


def _make(step: Step, name: str, a: str, b: str, row: int | None) -> Parting:
    request_id = None if row is None else step.commanded.rows[row].request_id
    return Parting(step.commanded.seq, step.commanded.cmd, name, request_id, a, b)
