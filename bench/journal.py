# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the journal costs a step: on the engine's thread, and the processor time of the writer's thread.

    OMP_NUM_THREADS=1 python -m bench.journal [--steps 200]

A step is a decode batch, given to the engine's own `Recording` as an engine does: the command, the answers with their
witnesses, and the tokens chosen with their logits; then the engine's thread computes for about 10 ms, without the
interpreter's lock, as a forward does. What the same calls cost without a journal is taken off. Shares are of steps of
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

import torch

from metrale_ray.protocol.codec import encode_command
from metrale_ray.protocol.commands import (
    BlockId,
    Cmd,
    CommandFrame,
    DecodeBatch,
    Envelope,
    Rank,
    Reply,
    Settled,
    Slot,
    Span,
    Status,
    Timing,
)
from metrale_ray.protocol.journal.journal import Journal, NoJournal
from metrale_ray.protocol.journal.records import probes
from metrale_ray.protocol.journal.writer import JournalWriter
from metrale_ray.protocol.verdict import Kind, Verdict
from metrale_ray.protocol.versions import ProtocolVersion
from metrale_ray.recording import Recording
from metrale_ray.sampling.noted_logits import NotedLogits
from metrale_ray.scheduler.plan import PlanRow
from metrale_ray.scheduler.request import RequestId

SIZES = ((1, 1), (8, 2), (32, 2), (32, 8), (128, 8))  # rows and ranks
STEPS_MS = (10, 30)
NAMES = ("command", "tokens", "blocks", "lengths")
VOCAB_SIZE = 151_936
STEP_S = 0.01
PIECE = bytes(2**20)


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per step."""

    noting_us: float
    noting_p99_us: float
    writer_us: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    print("| rows | ranks | redacted | engine's thread µs (p99) | writer's CPU µs | bytes | % of 10 ms | % of 30 ms |")
    print("|---|---|---|---|---|---|---|---|")
    for num_rows, num_ranks in SIZES:
        without = measure(num_rows, num_ranks, args.steps, NoJournal())
        for redact in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                journal = JournalWriter(folder, max_bytes=2**30, max_age_s=1e6, redact=redact)
                cost = measure(num_rows, num_ranks, args.steps, journal)
                num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*.journal")) / args.steps
            noting_us = cost.noting_us - without.noting_us
            shares = " | ".join(f"{(noting_us + cost.writer_us) / (step_ms * 10):.2f}" for step_ms in STEPS_MS)
            noting = f"{noting_us:.1f} ({cost.noting_p99_us:.1f})"
            size = f"{num_rows} | {num_ranks} | {'yes' if redact else 'no'}"
            print(f"| {size} | {noting} | {cost.writer_us:.1f} | {num_bytes:.0f} | {shares} |")


def measure(num_rows: int, num_ranks: int, num_steps: int, journal: Journal) -> Cost:
    """The cost of one size."""
    recording = Recording(journal)
    logits_RV = torch.randn(num_rows, VOCAB_SIZE)
    noting_us = []
    process_s, thread_s = time.process_time(), time.thread_time()
    for step in range(num_steps):
        # An engine frames the command and samples just before, so both are warm when the journal's turn comes.
        rows = [PlanRow(RequestId(slot), _span(slot, step), True) for slot in range(num_rows)]
        command = DecodeBatch(tuple(row.span for row in rows))
        envelope = Envelope(ProtocolVersion.V2, 1, step + 2, Settled(step + 1, True))
        frame = CommandFrame(envelope, command, encode_command(envelope, command))
        replies = [_reply(rank, step) for rank in range(num_ranks)]
        chosen = logits_RV.argmax(-1).tolist()
        token_ids = {row.request_id: token_id for row, token_id in zip(rows, chosen, strict=True)}
        began_s = time.perf_counter()
        _note(recording, frame, rows, replies, token_ids, logits_RV)
        noting_us.append((time.perf_counter() - began_s) * 1e6)
        _compute()
    own_s = time.thread_time() - thread_s
    journal.close("done", None)
    writer_s = time.process_time() - process_s - own_s
    p99_us = sorted(noting_us)[int(len(noting_us) * 0.99)]
    return Cost(statistics.median(noting_us), p99_us, writer_s / num_steps * 1e6)


def _note(
    recording: Recording,
    frame: CommandFrame,
    rows: list[PlanRow],
    replies: list[Reply],
    token_ids: dict[RequestId, int],
    logits_RV: torch.Tensor,
) -> None:
    heard = recording.sent(frame, rows)
    heard.replies += replies
    heard.lags_s += [0.00004] * len(replies)
    recording.heard(heard, Verdict(Kind.OK))
    if recording.is_on:
        noted = NotedLogits(logits_RV, list(range(len(rows))), list(token_ids.values()), probes(VOCAB_SIZE))
        recording.sampled(frame.envelope.seq, token_ids, noted)


def _compute() -> None:
    """Keep a core and its caches busy for a step."""
    until_s = time.perf_counter() + STEP_S
    while time.perf_counter() < until_s:
        blake2b(PIECE)


def _span(slot: int, step: int) -> Span:
    new_blocks = (BlockId(slot * 7),) if (slot + step) % 16 == 0 else ()
    return Span(Slot(slot), 1000 + step, (31_000 + slot,), new_blocks)


def _reply(rank: int, step: int) -> Reply:
    witness = {name: (step * len(NAMES) + index).to_bytes(8, "little") for index, name in enumerate(NAMES)}
    digest = step.to_bytes(8, "little")
    timing = Timing(1, 9000, 800)
    return Reply(2, 1, step + 2, Cmd.DECODE_BATCH, Rank(rank), Status.OK, digest, timing=timing, witness=witness)


if __name__ == "__main__":
    main()
