# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the protocol costs the head per step by the number of workers: one frame to all, and all replies judged.

    OMP_NUM_THREADS=1 python -m bench.fan_out [--workers 1,3,7,63,255] [--rows 32] [--steps 100]

Real links over ZeroMQ and CURVE on loopback. Up to 7 workers have a process each; more are simulated by one process
that holds the other ends of all links. Each worker decodes the command and answers with a witness, as a rank does.
After sending, the head sleeps for a step of 30 ms, as if it computed; the replies come meanwhile. What counts is its
time before and after: numbering, encoding and sending, then reading, decoding and judging. ZeroMQ's own thread works
beside the step, and its processor time is given apart.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from bench.repeats import percentile
from bench.results import write_results
from metrale_ray.protocol.commands import (
    BlockId,
    DecodeBatch,
    Hello,
    Rank,
    Reply,
    Shutdown,
    Slot,
    Span,
    Status,
    Timing,
    Welcome,
)
from metrale_ray.protocol.keys import KeyPair, new_keys
from metrale_ray.protocol.link import HeadLink, HeadPort, WorkerLink
from metrale_ray.protocol.session import HeadSession
from metrale_ray.protocol.verdict import judge
from metrale_ray.protocol.versions import ProtocolVersion
from metrale_ray.protocol.zmq_transport import ZmqTransport

HOST = "127.0.0.1"
VERSION, EPOCH = ProtocolVersion.V2, 1
STEP_S = 0.03
WAIT_S = 120.0
WARM_UP = 5
MOST_PROCESSES = 7
WITNESS = {name: bytes([index] * 8) for index, name in enumerate(("command", "tokens", "blocks", "lengths"))}
DIGEST = bytes(8)
SHARE_AIM = "under 1 % up to 63"


@dataclass(frozen=True)
class Cost:
    """Milliseconds of each step: before the ranks compute, after it, and of ZeroMQ's thread."""

    send_ms: list[float]
    collect_ms: list[float]
    io_ms: float
    frame_bytes: int

    @property
    def median_ms(self) -> float:
        """On the head's thread."""
        return statistics.median(map(sum, zip(self.send_ms, self.collect_ms, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=_numbers, default=[1, 3, 7, 63, 255])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    print(f"Decode batches of {args.rows} rows; the aim is {SHARE_AIM} workers.\n")
    print("| workers | in processes | frame bytes | send ms (p95) | collect and judge ms (p95) |", end="")
    print(" % of 30 ms | µs per worker | ZeroMQ ms |")
    print("|---|---|---|---|---|---|---|---|")
    results = {}
    for num_workers in args.workers:
        num_processes = num_workers if num_workers <= MOST_PROCESSES else 1
        cost = measure(num_workers, num_processes, args.rows, args.steps)
        results[num_workers] = cost.median_ms
        share = 100 * cost.median_ms / (1e3 * STEP_S)
        per_worker_us = 1e3 * cost.median_ms / num_workers
        times = f"{_text(cost.send_ms)} | {_text(cost.collect_ms)} | {share:.2f} | {per_worker_us:.0f}"
        print(f"| {num_workers} | {num_processes} | {cost.frame_bytes} | {times} | {cost.io_ms:.2f} |", flush=True)
    write_results("fan_out", results)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _text(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({percentile(values, 95):.3f})"


def measure(num_workers: int, num_processes: int, rows: int, num_steps: int) -> Cost:
    """The cost with so many workers, spread over so many processes."""
    links, processes = _open(num_workers, num_processes)
    session = HeadSession(VERSION, EPOCH)
    port = HeadPort(session, links)
    command = DecodeBatch(tuple(_row(slot) for slot in range(rows)))
    send_ms, collect_ms = [], []
    io_s, frame_bytes = 0.0, 0
    for step in range(WARM_UP + num_steps):
        process_s, thread_s = time.process_time(), time.thread_time()
        began_s = time.perf_counter()
        frame = port.broadcast(command)
        sent_s = time.perf_counter()
        time.sleep(STEP_S)
        woke_s = time.perf_counter()
        replies = [link.collect(frame, WAIT_S) for link in links]
        session.settle(judge(frame, [_reply(Rank(0), frame), *replies]).ok)
        judged_s = time.perf_counter()
        if step >= WARM_UP:
            send_ms.append(1e3 * (sent_s - began_s))
            collect_ms.append(1e3 * (judged_s - woke_s))
            io_s += (time.process_time() - process_s) - (time.thread_time() - thread_s)
        frame_bytes = len(frame.data)
    port.broadcast(Shutdown())
    for process in processes:
        process.join(WAIT_S)
    for link in links:
        link.close()
    return Cost(send_ms, collect_ms, 1e3 * io_s / num_steps, frame_bytes)


def _row(slot: int) -> Span:
    new_blocks = (BlockId(slot * 7),) if slot % 16 == 0 else ()
    return Span(Slot(slot), 1000 + slot, (31_000 + slot,), new_blocks)


def _reply(rank: Rank, frame: Any) -> Reply:
    timing = Timing(1, 29_000, 800)
    seq, code = frame.envelope.seq, frame.command.code
    return Reply(VERSION, EPOCH, seq, code, rank, Status.OK, DIGEST, timing=timing, witness=WITNESS)


def _open(num_workers: int, num_processes: int) -> tuple[list[HeadLink], list[Any]]:
    """Links to workers that have said hello, and the processes that they are in."""
    keys, context = new_keys(), multiprocessing.get_context("spawn")
    ranks = [list(range(first, num_workers + 1, num_processes)) for first in range(1, num_processes + 1)]
    transports: dict[int, ZmqTransport] = {}
    processes = []
    for of_process in ranks:
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(there, of_process))
        process.start()
        processes.append(process)
        for rank, public_key in here.recv().items():
            transports[rank] = ZmqTransport.listen(HOST, f"rank {rank}", keys, public_key)
        here.send((keys.public, {rank: transports[rank].address for rank in of_process}))
    links = [HeadLink(Rank(rank), transports[rank], VERSION, EPOCH) for rank in sorted(transports)]
    for link in links:
        link.expect_hello(WAIT_S)
        link.welcome(Welcome(VERSION, EPOCH, ""))
    return links, processes


def _work(head: Connection, ranks: Sequence[int]) -> None:
    """One process of workers: answer every command on each link, in turn."""
    keys: dict[int, KeyPair] = {rank: new_keys() for rank in ranks}
    head.send({rank: own.public for rank, own in keys.items()})
    head_key, addresses = head.recv()
    links = [_join(rank, keys[rank], addresses[rank], head_key) for rank in ranks]
    for link in links:
        link.expect_welcome(WAIT_S)
    is_over = False
    while not is_over:
        for link in links:
            frame = link.receive()
            link.reply(_reply(link.rank, frame))
            is_over = isinstance(frame.command, Shutdown)
    for link in links:
        link.close()


def _join(rank: int, keys: KeyPair, address: str, head_key: str) -> WorkerLink:
    link = WorkerLink(Rank(rank), ZmqTransport.connect(address, "the head", keys, head_key), VERSION)
    link.hello(Hello(Rank(rank), VERSION, {}, {}, 1))
    return link


if __name__ == "__main__":
    main()
