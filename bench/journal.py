# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the journal costs a step: making and noting its records on the engine's thread, and the writer's processor time.

    python bench/journal.py [--steps 200]

A step is a decode batch: the command, the answers with their witnesses, and the tokens chosen with their logits; then
the engine's thread computes for about 10 ms, without the interpreter's lock, as a forward does. Shares are of steps of
10 and 30 ms, of both threads together: the writer's work runs beside the step where a core is free, and is counted all
the same.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from metrale_ray.protocol.codec import encode_command
from metrale_ray.protocol.commands import BlockId, DecodeBatch, Envelope, Settled, Slot, Span
from metrale_ray.protocol.journal.records import Answered, Commanded, RankAnswer, Record, RowNote, Sampled, TokenNote
from metrale_ray.protocol.journal.writer import JournalWriter
from metrale_ray.protocol.versions import ProtocolVersion

SIZES = ((1, 1), (8, 2), (32, 2), (32, 8), (128, 8))  # rows and ranks
STEPS_MS = (10, 30)
WITNESS = {"command": bytes(8), "tokens": bytes(8), "blocks": bytes(8), "lengths": bytes(8)}
STEP_S = 0.01
PIECE = bytes(2**20)


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per step, and bytes."""

    make_us: float
    note_us: float
    note_p99_us: float
    writer_us: float
    num_bytes: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    print("| rows | ranks | redacted | make µs | note µs (p99) | writer's CPU µs | bytes | % of 10 ms | % of 30 ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    for num_rows, num_ranks in SIZES:
        for redact in (False, True):
            cost = measure(num_rows, num_ranks, args.steps, redact=redact)
            total_us = cost.make_us + cost.note_us + cost.writer_us
            shares = " | ".join(f"{total_us / (step_ms * 10):.2f}" for step_ms in STEPS_MS)
            note = f"{cost.note_us:.1f} ({cost.note_p99_us:.1f})"
            size = f"{num_rows} | {num_ranks} | {'yes' if redact else 'no'}"
            print(f"| {size} | {cost.make_us:.1f} | {note} | {cost.writer_us:.1f} | {cost.num_bytes:.0f} | {shares} |")


def measure(num_rows: int, num_ranks: int, num_steps: int, *, redact: bool) -> Cost:
    """The cost of one size."""
    command = DecodeBatch(tuple(_row(slot) for slot in range(num_rows)))
    make_us, note_us = [], []
    with tempfile.TemporaryDirectory() as folder:
        journal = JournalWriter(folder, max_bytes=2**30, max_age_s=1e6, redact=redact)
        process_s, thread_s = time.process_time(), time.thread_time()
        for step in range(num_steps):
            # An engine frames the command just before, and so the interpreter is warm when the journal's turn comes.
            data = encode_command(Envelope(ProtocolVersion.V2, 1, step + 2, Settled(step + 1, True)), command)
            before_s = time.perf_counter()
            records = _records(step, command, data, num_ranks)
            made_s = time.perf_counter()
            for record in records:
                journal.note(record)
            noted_s = time.perf_counter()
            make_us.append((made_s - before_s) * 1e6)
            note_us.append((noted_s - made_s) * 1e6)
            _compute()
        own_s = time.thread_time() - thread_s
        journal.close("done", None)
        writer_s = time.process_time() - process_s - own_s
        num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*.journal"))
    p99_us = sorted(note_us)[int(len(note_us) * 0.99)]
    return Cost(
        statistics.median(make_us),
        statistics.median(note_us),
        p99_us,
        writer_s / num_steps * 1e6,
        num_bytes / num_steps,
    )


def _compute() -> None:
    """Keep a core and its caches busy for a step."""
    until_s = time.perf_counter() + STEP_S
    while time.perf_counter() < until_s:
        blake2b(PIECE)


def _row(slot: int) -> Span:
    return Span(Slot(slot), 1000 + slot, (31_000 + slot,), (BlockId(slot * 7),) if slot % 16 == 0 else ())


def _records(step: int, command: DecodeBatch, data: bytes, num_ranks: int) -> tuple[Record, ...]:
    """The records of one step, made as an engine makes them."""
    rows = tuple(RowNote(span.slot, span.slot, span.start, len(span.token_ids), True) for span in command.rows)
    answers = tuple(RankAnswer(rank, 0, bytes(8), WITNESS, 9000, 800, 40, None) for rank in range(num_ranks))
    tokens = tuple(TokenNote(row.request_id, 31_000, (12.5, 0.25, -1.5, 3.75, 0.125)) for row in rows)
    return (
        Commanded(step * 10_000, 1, step, int(command.code), rows, data),
        Answered(step * 10_000 + 9000, step, "ok", None, "", answers),
        Sampled(step * 10_000 + 9500, step, tokens),
    )


if __name__ == "__main__":
    main()
