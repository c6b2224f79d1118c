# SPDX-License-Identifier: MIT OR Apache-2.0
"""`metrale-ray replay` and `metrale-ray bisect`: a journal run again, and where two runs of the same commands part.

Rules. Exit code 0 when all is the same, 1 at the first difference, 2 for what cannot be run (a damaged or redacted
journal, another checkpoint). No Ray is used; all ranks are in this process.

The JSON's keys. Of replay: `same`, `journal`, `model`, `recorded_ranks`, `ranks`, `commands`, `tokens`, `requests`,
`failed` (commands that did not succeed when recorded), `failed_again`, `values` (logits compared), `exact_values` (of
these to the last bit), `largest_gap` (null without values, or where one was no number), `kernel_differences`,
`file_differences`, `remarks`, `difference` (null without one: `seq`, `command`, `field`, `rank`, `request`,
`recorded`, `found`). Of bisect: `same`, `commands`, `logits`, `tolerance`, `largest_gap`, `largest_gap_seq`,
`remarks`, `parting` (null without one: `seq`, `command`, `field`, `request`, `a`, `b`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from metrale_ray.cli_journal_flags import RANK_SETTINGS
from metrale_ray.cli_output import console, write_object
from metrale_ray.errors import UserError
from metrale_ray.progress import counted, phases
from metrale_ray.protocol.journal.reader import JournalReader, open_journal
from metrale_ray.replay.parting import DEFAULT_TOLERANCE

if TYPE_CHECKING:
    from metrale_ray.config import EngineConfig
    from metrale_ray.protocol.journal.records import Started
    from metrale_ray.replay.parting import BisectResult
    from metrale_ray.replay.replaying import ReplayResult

SAME, DIFFERS = 0, 1
Row = tuple[str, str]


def replay(given: Mapping[str, Any], answers: TextIO) -> int:
    """Run a journal again and give the exit code. Raises UserError for what cannot be run, and StartError."""
    from metrale_ray.replay.replaying import replay_journal, started_of

    reader = open_journal(given["journal"])
    started = started_of(reader)
    config = _config(started, given, {name: given[name] for name in RANK_SETTINGS if name in given})
    with phases() as on_progress:
        result = replay_journal(
            reader, config, any_checkpoint=bool(given.get("any_checkpoint")), on_progress=on_progress
        )
    _tell_torn(reader, result.remarks)
    if given.get("json"):
        write_object(answers, _replay_object(reader, started, config, result))
    else:
        _write(answers, _replay_rows(reader, started, config, result))
    return SAME if result.difference is None else DIFFERS


def bisect(given: Mapping[str, Any], answers: TextIO) -> int:
    """Find where two journals, or two runs of one, part, and give the exit code. Raises as `replay`."""
    result = _bisect_one(given) if given.get("other") is None else _bisect_two(given)
    if given.get("json"):
        write_object(answers, _bisect_object(result))
    else:
        _write(answers, _bisect_rows(result))
    return SAME if result.parting is None else DIFFERS


def _bisect_two(given: Mapping[str, Any]) -> BisectResult:
    from metrale_ray.replay.journal_bisecting import bisect_journals

    for name in ("a", "b", "model", "any_checkpoint"):
        if name in given:
            raise UserError(
                f"--{name.replace('_', '-')} is for running one journal twice; two journals are compared as they are. "
                "Leave it out, or name one journal."
            )
    a, b = open_journal(given["journal"]), open_journal(given["other"])
    with counted(_num_commands(a), "commands", shown=True) as on_step:
        result = bisect_journals(a, b, given.get("tolerance", DEFAULT_TOLERANCE), on_step)
    for name, reader in (("A", a), ("B", b)):
        _tell_torn(reader, result.remarks, name)
    return result


def _bisect_one(given: Mapping[str, Any]) -> BisectResult:
    from metrale_ray.replay.configuration_bisecting import bisect_configurations
    from metrale_ray.replay.replaying import started_of

    sides = given.get("a", {}), given.get("b", {})
    if sides[0] == sides[1]:
        raise UserError(
            "one journal is run under two configurations, and these are the same: say what differs, such as "
            "--a ep-size=1 --b ep-size=2; or name a second journal"
        )
    reader = open_journal(given["journal"])
    started = started_of(reader)
    a, b = (_config(started, given, side) for side in sides)
    with phases() as on_progress:
        result = bisect_configurations(
            reader,
            a,
            b,
            given.get("tolerance", DEFAULT_TOLERANCE),
            any_checkpoint=bool(given.get("any_checkpoint")),
            on_progress=on_progress,
        )
    _tell_torn(reader, result.remarks)
    return result


def _config(started: Started, given: Mapping[str, Any], settings: Mapping[str, Any]) -> EngineConfig:
    from metrale_ray.replay.settings import replay_config

    return replay_config(started, model=given.get("model"), **settings).resolved()


def _num_commands(reader: JournalReader) -> int:
    from metrale_ray.protocol.journal.records import Commanded

    return sum(isinstance(record, Commanded) for record in reader)


def _tell_torn(reader: JournalReader, remarks: list[str], name: str = "the journal") -> None:
    if reader.torn:
        remarks.append(f"the last record of {name} is torn, as after a crash, and was left out")


def _replay_object(
    reader: JournalReader, started: Started, config: EngineConfig, result: ReplayResult
) -> dict[str, Any]:
    difference = result.difference
    return {
        "same": difference is None,
        "journal": str(reader.path),
        "model": config.model,
        "recorded_ranks": len(started.ranks),
        "ranks": config.ep_size,
        "commands": result.num_commands,
        "tokens": result.num_tokens,
        "requests": result.num_requests,
        "failed": result.num_failed,
        "failed_again": result.num_failed_again,
        "values": result.num_values,
        "exact_values": result.num_exact_values,
        "largest_gap": _finite(result.largest_gap) if result.num_values else None,
        "kernel_differences": list(result.kernel_differences),
        "file_differences": list(result.file_differences),
        "remarks": result.remarks,
        "difference": difference
        and {
            "seq": difference.seq,
            "command": _name(difference.cmd),
            "field": difference.field,
            "rank": difference.rank,
            "request": difference.request_id,
            "recorded": difference.recorded,
            "found": difference.found,
        },
    }


def _bisect_object(result: BisectResult) -> dict[str, Any]:
    parting = result.parting
    return {
        "same": parting is None,
        "commands": result.num_commands,
        "logits": result.num_logits,
        "tolerance": result.tolerance,
        "largest_gap": _finite(result.largest_gap) if result.num_logits else None,
        "largest_gap_seq": result.largest_gap_seq,
        "remarks": result.remarks,
        "parting": parting
        and {
            "seq": parting.seq,
            "command": _name(parting.cmd),
            "field": parting.field,
            "request": parting.request_id,
            "a": parting.a,
            "b": parting.b,
        },
    }


def _replay_rows(reader: JournalReader, started: Started, config: EngineConfig, result: ReplayResult) -> Iterator[Row]:
    yield "journal", str(reader.path)
    yield "recorded", f"{_count(len(started.ranks), 'rank')}, protocol v{started.version}, epoch {started.epoch}"
    yield "here", f"{_count(config.ep_size, 'rank')} in one process, {config.model}"
    for line in (*result.kernel_differences, *result.file_differences):
        yield "differs", line
    if result.kernel_differences or result.file_differences:
        yield "so", "tokens and digests are compared, and not the last bits of logits and hidden states"
    yield (
        "ran",
        (
            f"{_count(result.num_commands, 'command')}, {_count(result.num_tokens, 'token')} of "
            f"{_count(result.num_requests, 'sequence')}"
        ),
    )
    if result.num_failed:
        yield "failed", f"{_count(result.num_failed, 'command')} when recorded, {result.num_failed_again} of them here"
    if result.num_values:
        exact = f"{result.num_exact_values:,} of {result.num_values:,} to the last bit"
        yield "logits", f"{exact}, largest difference {result.largest_gap:.3g}"
    for remark in result.remarks:
        yield "note", remark
    if result.difference is None:
        yield "result", "the same"
    else:
        yield "result", f"differs at {_command(result.difference.seq, result.difference.cmd)}: {result.difference}"


def _bisect_rows(result: BisectResult) -> Iterator[Row]:
    yield "compared", f"{_count(result.num_commands, 'command')}, {_count(result.num_logits, 'logit')}"
    if result.largest_gap_seq is not None:
        yield "largest", f"difference {result.largest_gap:.3g}, at command {result.largest_gap_seq}"
    for remark in result.remarks:
        yield "note", remark
    if result.parting is None:
        yield "result", f"the same within {result.tolerance:g}"
    else:
        yield "result", f"part at {_command(result.parting.seq, result.parting.cmd)}: {result.parting}"


def _write(answers: TextIO, rows: Iterator[Row]) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows:
        table.add_row(name, value)
    console(answers).print(table)
    answers.flush()


def _command(seq: int, cmd: int) -> str:
    return f"command {seq} ({_name(cmd)})"


def _name(cmd: int) -> str:
    from metrale_ray.replay.names import cmd_name

    return cmd_name(cmd)


def _count(number: int, unit: str) -> str:
    return f"{number:,} {unit}{'s' * (number != 1)}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
