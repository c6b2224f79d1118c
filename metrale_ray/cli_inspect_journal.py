# SPDX-License-Identifier: MIT OR Apache-2.0
"""`metrale-ray inspect-journal`: what a journal or a dump says, as tables or as one JSON object.

Rules. Exit code 0, also for a journal full of failures; 2 for one that cannot be read. Nothing is run. Times are
seconds since the engine's start in the tables, and microseconds in JSON.

The JSON's keys: `journal`, `started` (null where the file does not say: `time` (UTC), `package`, `epoch`, `protocol`,
`redacted`, `ranks` (what each told at the handshake), `num_blocks`, `seed`, `config`, `must_equal`), `snapshot_seq`
(the journal begins behind this command; null: at the start), `num_commands`, `by_command`, `outcomes`,
`num_sequences`, `num_failures`, `num_gaps`, `num_unknown` (records of a later build), `torn`, `end` (null where the
engine was killed or still runs: `at_us`, `reason`, `failure`), and the last ones of `commands` (`at_us`, `seq`,
`command`, `outcome`, `rank`, `message`, `took_us`, `rows`: each `request`, `slot`, `start`, `num_tokens`, `samples`,
`token` (the one chosen)), of `sequences` (`request`, `front`, `number`, `admitted_us`, `num_prompt_tokens`,
`prompt_token_ids`, `seed`, `priority`, `deadline_s`, `num_tokens`, `token_ids`, `num_starts`, `first_token_us`,
`ended_us`, `reason`, `code`, `message`), and of `failures` (`at_us`, `what`, `seq`, `request`, `rank`, `text`); and
`ranks`, each `rank`, `answers`, `lag_us`, `computed_us`, `waited_us`, each `mean`, `p99`, `max`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

from metrale_ray.cli_journal_flags import DEFAULT_LIMIT
from metrale_ray.cli_output import console, write_object
from metrale_ray.progress import phases
from metrale_ray.protocol.journal.reader import JournalReader, open_journal
from metrale_ray.protocol.journal.records import Started
from metrale_ray.replay.listing import CommandLine, FailureLine, Listing, SequenceLine, Wanted, spread
from metrale_ray.replay.names import cmd_name

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_ROWS = 4  # of one command in the table; the JSON has all
SHOWN_TOKENS = 12
RECORDS_PER_LOOK = 2_000  # some tenths of a second
TIMES = ("lag_us", "computed_us", "waited_us")


def inspect_journal(given: Mapping[str, Any], answers: TextIO) -> int:
    """Write what the journal says and give the exit code. Raises JournalError for one that cannot be read."""
    reader = open_journal(given["journal"])
    wanted = Wanted(given.get("request"), given.get("front_request"), bool(given.get("failures")))
    listing = Listing(wanted, given.get("limit", DEFAULT_LIMIT) or None)
    with phases() as on_progress:
        for number, record in enumerate(reader):
            listing.add(record)
            if number % RECORDS_PER_LOOK == 0:
                on_progress("reading", reader.num_bytes_read, reader.num_bytes)
    if given.get("json"):
        write_object(answers, describe(reader, listing))
    else:
        _write(console(answers), reader, listing)
        answers.flush()
    return 0


def describe(reader: JournalReader, listing: Listing) -> dict[str, Any]:
    """The JSON object; the keys are those of the file's docstring."""
    closed = listing.closed
    return {
        "journal": str(reader.path),
        "started": None if listing.started is None else _started_object(listing.started),
        "snapshot_seq": listing.snapshot_seq,
        "num_commands": listing.num_commands,
        "by_command": {cmd_name(cmd): number for cmd, number in sorted(listing.by_cmd.items())},
        "outcomes": dict(listing.outcomes),
        "num_sequences": listing.num_sequences,
        "num_failures": listing.num_failures,
        "num_gaps": listing.num_gaps,
        "num_unknown": listing.num_unknown,
        "torn": reader.torn,
        "end": closed and {"at_us": closed.at_us, "reason": closed.reason, "failure": closed.failure},
        "commands": [_command_object(line) for line in listing.commands],
        "sequences": [_renamed(line) for line in listing.sequences],
        "failures": [_renamed(line) for line in listing.failures],
        "ranks": [
            {
                "rank": rank,
                "answers": len(times.lag_us),
                **{name: spread(getattr(times, name)) for name in TIMES},
            }
            for rank, times in sorted(listing.ranks.items())
        ],
    }


def _started_object(started: Started) -> dict[str, Any]:
    return {
        "time": _time_text(started),
        "package": started.package,
        "epoch": started.epoch,
        "protocol": f"v{started.version}",
        "redacted": started.redacted,
        "ranks": [dict(told) for told in started.ranks],
        "num_blocks": started.num_blocks,
        "seed": started.seed,
        "config": dict(started.config),
        "must_equal": dict(started.must_equal),
    }


def _command_object(line: CommandLine) -> dict[str, Any]:
    return {
        "at_us": line.at_us,
        "seq": line.seq,
        "command": cmd_name(line.cmd),
        "outcome": line.outcome,
        "rank": line.rank,
        "message": line.message,
        "took_us": line.took_us,
        "rows": [
            {
                "request": row.request_id,
                "slot": row.slot,
                "start": row.start,
                "num_tokens": row.num_tokens,
                "samples": row.samples,
                "token": line.token_ids.get(row.request_id),
            }
            for row in line.rows
        ],
    }


def _renamed(line: SequenceLine | FailureLine) -> dict[str, Any]:
    """The line's fields by their names; a request's id is `request`, as everywhere in the JSON."""
    return {("request" if name == "request_id" else name): value for name, value in dataclasses.asdict(line).items()}


def _write(where: Console, reader: JournalReader, listing: Listing) -> None:
    from rich.table import Table

    head = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _head_rows(reader, listing):
        head.add_row(name, value)
    where.print(head)
    tables: tuple[tuple[str, Sequence[str], Iterable[Sequence[str]]], ...] = (
        (
            _title("commands", listing.commands, listing.num_commands),
            ("time", "seq", "command", "outcome", "took", "rows: request/slot start+tokens", "chosen"),
            map(_command_row, listing.commands),
        ),
        (
            _title("sequences", listing.sequences, listing.num_sequences),
            ("request", "front:number", "admitted", "prompt", "tokens", "starts", "first", "ended", "reason", "text"),
            map(_sequence_row, listing.sequences),
        ),
        (
            _title("failures", listing.failures, listing.num_failures),
            ("time", "what", "command", "request", "rank", "text"),
            map(_failure_row, listing.failures),
        ),
        (
            "ranks, in milliseconds: mean / 99th percentile / largest",
            ("rank", "answers", "later than the first", "computing", "in sums"),
            _rank_rows(listing),
        ),
    )
    for title, columns, rows in tables:
        table = Table(*columns, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        if table.row_count:
            where.print(f"\n{title}")
            where.print(table)


def _title(noun: str, shown: Sequence[object], total: int) -> str:
    return f"{noun}: {total:,}" if len(shown) == total else f"{noun}: {len(shown):,} shown, {total:,} in all"


def _head_rows(reader: JournalReader, listing: Listing) -> Iterator[tuple[str, str]]:
    yield "journal", str(reader.path)
    started, closed = listing.started, listing.closed
    if started is not None:
        ranks = f"{len(started.ranks)} rank{'s' * (len(started.ranks) != 1)}"
        yield "started", f"{_time_text(started)}, version {started.package}, epoch {started.epoch}"
        yield "engine", f"{ranks}, protocol v{started.version}, {started.num_blocks:,} KV blocks"
        yield "model", str(started.config.get("model", "not said"))
        for number, told in enumerate(started.ranks):
            yield f"rank {number}", ", ".join(f"{name} {value}" for name, value in told.items() if value)
    if started is not None and started.redacted:
        yield "redacted", "prompts, tokens and texts were left out"
    if listing.snapshot_seq is not None:
        yield "begins", f"at the snapshot behind command {listing.snapshot_seq}; what was before is gone"
    outcomes = ", ".join(f"{number:,} {name}" for name, number in listing.outcomes.most_common())
    yield "answers", outcomes or "none"
    if listing.num_unknown:
        yield "unknown", f"{listing.num_unknown:,} records of a later build were passed over"
    if reader.torn:
        yield "torn", "the last record is not whole, as after a crash, and was left out"
    if closed is None:
        yield "end", "none: the engine was killed, or still runs"
    else:
        yield "end", f"{_seconds(closed.at_us)}, {closed.reason}" + (f": {closed.failure}" if closed.failure else "")


def _command_row(line: CommandLine) -> tuple[str, ...]:
    rows = [f"{row.request_id}/{row.slot} {row.start}+{row.num_tokens}" for row in line.rows]
    chosen = ["?" if token is None else str(token) for token in line.token_ids.values()]
    outcome = "none" if line.outcome is None else line.outcome
    return (
        _seconds(line.at_us),
        str(line.seq),
        cmd_name(line.cmd),
        outcome if line.rank is None else f"{outcome} by rank {line.rank}",
        _milliseconds(line.took_us),
        _some(rows, SHOWN_ROWS),
        _some(chosen, SHOWN_ROWS),
    )


def _sequence_row(line: SequenceLine) -> tuple[str, ...]:
    return (
        str(line.request_id),
        f"{line.front}:{line.number}",
        _seconds(line.admitted_us),
        str(line.num_prompt_tokens),
        str(line.num_tokens),
        str(line.num_starts),
        "none" if line.first_token_us is None else _seconds(line.first_token_us),
        "" if line.ended_us is None else _seconds(line.ended_us),
        line.reason or "not ended",
        line.message or _some([str(token_id) for token_id in line.token_ids], SHOWN_TOKENS),
    )


def _failure_row(line: FailureLine) -> tuple[str, ...]:
    numbers = ("" if number is None else str(number) for number in (line.seq, line.request_id, line.rank))
    return (_seconds(line.at_us), line.what, *numbers, line.text)


def _rank_rows(listing: Listing) -> Iterator[tuple[str, ...]]:
    for rank, times in sorted(listing.ranks.items()):
        spreads = (spread(getattr(times, name)) for name in TIMES)
        shown = (" / ".join(_milliseconds(value) for value in each.values()) for each in spreads)
        yield (str(rank), f"{len(times.lag_us):,}", *shown)


def _some(texts: Sequence[str], number: int) -> str:
    rest = len(texts) - number
    return ", ".join(texts[:number]) + (f" and {rest} more" if rest > 0 else "")


def _time_text(started: Started) -> str:
    return datetime.fromtimestamp(started.wall_time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _seconds(at_us: int) -> str:
    return f"{at_us / 1e6:.6f}"


def _milliseconds(us: int) -> str:
    return f"{us / 1e3:.3f}"
