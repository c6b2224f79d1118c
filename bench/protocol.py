# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the protocol and the head cost: encode, decode and round trip per command, and the head's own time per step.

    python -m bench.protocol [--reps 2000]

Encode and decode are of one frame. A round trip is command and reply between two processes over ZeroMQ on loopback,
the worker decoding the command and answering at once. The head's time per step is planning, framing, judging and
applying, without model, sampler and waiting, at full decode batches.

Agreement is what every command pays for its witness, and the first step of each interval for the other one; a scrub
reads weights at the speed given. The shares are of a decode step of 10 ms and of 30 ms.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

import torch

from metrale_ray.model.checksums import PART_BYTES, Checksums
from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.model.slot_checks import SlotLimits
from metrale_ray.model.slots import Slots
from metrale_ray.model.step_watch import StepWatch
from metrale_ray.protocol.codec import decode_command, decode_reply, encode_command, encode_reply
from metrale_ray.protocol.commands import (
    BlockId,
    Command,
    CommandFrame,
    Decode,
    DecodeBatch,
    Envelope,
    FreeSlot,
    Hello,
    MixedStep,
    Ping,
    PrefillChunk,
    Rank,
    Reply,
    Settled,
    Shutdown,
    Slot,
    Span,
    Status,
    Timing,
    Welcome,
)
from metrale_ray.protocol.keys import new_keys
from metrale_ray.protocol.link import HeadLink, WorkerLink
from metrale_ray.protocol.session import HeadSession
from metrale_ray.protocol.verdict import judge
from metrale_ray.protocol.versions import ProtocolVersion
from metrale_ray.protocol.zmq_transport import ZmqTransport
from metrale_ray.scheduler.limits import SchedulerLimits
from metrale_ray.scheduler.plan import plan_command
from metrale_ray.scheduler.request import Request, RequestId
from metrale_ray.scheduler.scheduler import Scheduler

V2 = ProtocolVersion.V2
ENVELOPE = Envelope(V2, 1, 1000, Settled(999, True))
DIGEST = bytes(8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=2000)
    args = parser.parse_args()
    _print_commands(args.reps)
    _print_head(args.reps)
    _print_agreement(min(args.reps, 500))


def commands() -> dict[str, Command]:
    """One of each kind, the batches at the sizes that the ladder names."""
    named: dict[str, Command] = {"ping": Ping(), "free slot": FreeSlot(Slot(3)), "decode": Decode(_decode_row(3))}
    named["prefill chunk of 512"] = PrefillChunk(_chunk(0, 512))
    for rows in (8, 32, 128):
        named[f"decode batch of {rows}"] = DecodeBatch(tuple(_decode_row(slot) for slot in range(rows)))
    named["mixed step of 31 and 480"] = MixedStep((*(_decode_row(slot) for slot in range(31)), _chunk(31, 480)))
    return named


def _decode_row(slot: int) -> Span:
    new_blocks = (BlockId(slot * 7),) if slot % 16 == 0 else ()
    return Span(Slot(slot), 1000 + slot, (31_000 + slot,), new_blocks)


def _chunk(slot: int, length: int) -> Span:
    blocks = tuple(BlockId(5000 + block) for block in range(length // 16))
    return Span(Slot(slot), 0, tuple(range(length)), blocks)


def _print_commands(reps: int) -> None:
    link, child = _echo_worker()
    session = HeadSession(V2, 1)
    print("| command | bytes | encode µs | decode µs | round trip µs (p95) |")
    print("|---|---|---|---|---|")
    for name, command in commands().items():
        data = encode_command(ENVELOPE, command)
        encode = _median_us(reps, lambda command=command: encode_command(ENVELOPE, command))
        decode = _median_us(reps, lambda data=data: decode_command(data))
        trips = _round_trips(reps, link, session, command)
        p95 = trips[int(len(trips) * 0.95)]
        print(f"| {name} | {len(data)} | {encode:.1f} | {decode:.1f} | {statistics.median(trips):.0f} ({p95:.0f}) |")
    reply = Reply(V2, 1, 1000, Ping.code, Rank(1), Status.OK, DIGEST, timing=Timing(1, 2, 3))
    data = encode_reply(reply)
    encode = _median_us(reps, lambda: encode_reply(reply))
    print(f"| (a reply) | {len(data)} | {encode:.1f} | {_median_us(reps, lambda: decode_reply(data)):.1f} | |")
    link.send(session.frame(Shutdown()))
    child.join()
    link.close()


def _median_us(reps: int, work: Callable[[], object]) -> float:
    times = []
    for _ in range(reps):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def _echo_worker() -> tuple[HeadLink, multiprocessing.Process]:
    keys = new_keys()
    here, there = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_echo, args=(there,))
    child.start()
    transport = ZmqTransport.listen("127.0.0.1", "rank 1", keys, here.recv())
    here.send((transport.address, keys.public))
    link = HeadLink(Rank(1), transport, V2, 1)
    link.expect_hello(30)
    link.welcome(Welcome(V2, 1, ""))
    return link, child


def _echo(head: Connection) -> None:
    keys = new_keys()
    head.send(keys.public)
    address, head_key = head.recv()
    link = WorkerLink(Rank(1), ZmqTransport.connect(address, "the head", keys, head_key), V2)
    link.hello(Hello(Rank(1), V2, {}, {}, 1))
    link.expect_welcome(30)
    while True:
        frame = link.receive()
        envelope = frame.envelope
        link.reply(Reply(V2, envelope.epoch, envelope.seq, frame.command.code, Rank(1), Status.OK, DIGEST))
        if isinstance(frame.command, Shutdown):
            link.close()
            return


def _round_trips(reps: int, link: HeadLink, session: HeadSession, command: Command) -> list[float]:
    times = []
    for _ in range(reps):
        started = time.perf_counter()
        frame = session.frame(command)
        link.send(frame)
        link.collect(frame, 10)
        times.append((time.perf_counter() - started) * 1e6)
        session.settle(True)
    return sorted(times)


def _print_head(reps: int) -> None:
    print("\n| rows | head's own time per step, ms (p95) |")
    print("|---|---|")
    for rows in (1, 8, 32, 128):
        times = _head_steps(rows, min(reps, 500))
        print(f"| {rows} | {statistics.median(times):.3f} ({times[int(len(times) * 0.95)]:.3f}) |")


def _head_steps(rows: int, steps: int) -> list[float]:
    """Milliseconds of each decode step of `rows` sequences, with one worker's reply judged."""
    scheduler = Scheduler(SchedulerLimits(128, 4096, 4096, 128 * 256, 16))
    for number in range(rows):
        scheduler.add(Request(RequestId(number), tuple(range(16)), 4000, frozenset({2})))
    session = HeadSession(V2, 1)
    times = []
    for step in range(steps + 1):
        started = time.perf_counter()
        plan = scheduler.next_step()
        assert plan is not None, "every sequence has tokens left"
        frame = session.frame(plan_command(plan.rows, V2))
        reply = Reply(V2, 1, frame.envelope.seq, frame.command.code, Rank(0), Status.OK, DIGEST)
        verdict = judge(frame, [reply, reply])
        session.settle(verdict.ok)
        scheduler.apply(plan, {row.request_id: 7 for row in plan.rows})
        if step > 0:  # the first one is the prefill
            times.append((time.perf_counter() - started) * 1e3)
    return sorted(times)


def _print_agreement(reps: int) -> None:
    torch.set_num_threads(1)
    print("\n| agreement of 32 rows | µs | % of 10 ms | % of 30 ms |")
    print("|---|---|---|---|")
    for num_blocks in (4, 64, 256):
        slots = _staged_slots(32, num_blocks)
        _print_share(f"witness of a command, {num_blocks} blocks per row", _median_us(reps, slots.witness))
    witness = _staged_slots(32, 64).witness()
    plain, full = (_reply_us(reps, found) for found in ({}, witness))
    _print_share("the reply that carries it, packed and read, without the rest", full - plain)
    watch_us = _median_us(min(reps, 100), lambda: _watch_step(32, 48))
    _print_share("hidden state of 2048 and routing of 48 layers", watch_us)
    _print_share("the same, spread over 16 commands", watch_us / 16)
    print("\n| a scrub reads | MB/s |")
    print("|---|---|")
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.ones(PART_BYTES // dtype.itemsize, dtype=dtype)
        print(f"| weights, {str(dtype).removeprefix('torch.')} | {_scrub_mb_per_s(weight):.0f} |")


def _print_share(name: str, us: float) -> None:
    print(f"| {name} | {us:.1f} | {us / 1e4 * 100:.2f} | {us / 3e4 * 100:.2f} |")


def _staged_slots(rows: int, num_blocks: int) -> Slots:
    """A rank's slots in the middle of a decode batch, each with a block table of that length."""
    length = num_blocks * 16 - 1
    slots = Slots(SlotLimits(rows, length + 1, rows * length, 2**17, 16), SequenceState, lambda seq: None)
    slots.reserve(rows * num_blocks)
    tables = [tuple(BlockId(slot * num_blocks + block) for block in range(num_blocks)) for slot in range(rows)]
    prompts = MixedStep(tuple(Span(Slot(slot), 0, (1,) * length, table) for slot, table in enumerate(tables)))
    batch = DecodeBatch(tuple(Span(Slot(slot), length, (31_000 + slot,)) for slot in range(rows)))
    for seq, command in enumerate((prompts, batch), 1):
        envelope = Envelope(V2, 1, seq, Settled(1, True) if seq > 1 else None)
        slots.settle(envelope.settled)
        slots.check(command)
        slots.stage(CommandFrame(envelope, command, encode_command(envelope, command)))
        slots.succeeded()
    return slots


def _reply_us(reps: int, witness: Mapping[str, bytes]) -> float:
    reply = Reply(V2, 1, 1000, DecodeBatch.code, Rank(1), Status.OK, DIGEST, timing=Timing(1, 2, 3), witness=witness)
    return _median_us(reps, lambda: decode_reply(encode_reply(reply)))


def _watch_step(rows: int, layers: int) -> dict[str, bytes]:
    watch = StepWatch(range(rows), torch.device("cpu"))
    chosen, weights = torch.zeros(rows, 8, dtype=torch.int64), torch.ones(rows, 8)
    for _ in range(layers):
        watch.note_routing(chosen, weights)
    watch.note_residual(torch.ones(rows, 2048, dtype=torch.bfloat16))
    return watch.witness()


def _scrub_mb_per_s(weight: torch.Tensor) -> float:
    sums = Checksums({"embedding": weight})
    sums.note_loaded()
    return weight.nbytes / _median_us(10, lambda: sums.digest(0, 1))


if __name__ == "__main__":
    main()
