# SPDX-License-Identifier: MIT OR Apache-2.0
"""The head's own time per step: an engine whose model computes nothing, with one worker that answers at once.

    OMP_NUM_THREADS=1 python -m bench.head [--rows 1,8,32,128] [--steps 400] [--vocab 32000]

Full decode batches of greedy requests. The whole step is timed from outside, less the worker's own work, which another
process would do. The head's own part is that less what rank 0 does as a rank (settle, check, stage, witness) and less
the sampler, which has a benchmark of its own: planning, framing, sending, reading and judging the reply, noting and
delivering the tokens. All are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

from bench.null_model import AnsweringTransport, null_replica
from bench.repeats import percentile
from bench.results import write_results
from metrale_ray.counters import CommandCounters
from metrale_ray.engine import Engine
from metrale_ray.model.slot_checks import SlotLimits
from metrale_ray.protocol.commands import Cmd, Rank, Welcome
from metrale_ray.protocol.link import HeadLink, HeadPort
from metrale_ray.protocol.session import HeadSession
from metrale_ray.protocol.versions import ProtocolVersion
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.scheduler.limits import SchedulerLimits
from metrale_ray.scheduler.request import RequestId
from metrale_ray.scheduler.scheduler import Scheduler

VERSION, EPOCH = ProtocolVersion.V2, 1
BLOCK_SIZE = 16
PROMPT_TOKENS = 128
WARM_UP = 20
MORE_TOKENS = 200  # decoded while the last prompts are computed
AIMS_MS = {32: 0.5, 128: 1.5}
PHASES = ("plan_s", "send_s", "run_s", "reply_s", "sample_s", "deliver_s")


@dataclass(frozen=True)
class Steps:
    """Milliseconds of each step: the whole, the head's own part of it, and each phase by name."""

    whole_ms: list[float]
    own_ms: list[float]
    phases_ms: dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32, 128])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--vocab", type=int, default=32_000)
    args = parser.parse_args()
    print(
        "| rows | head's own ms (p95) | aim | whole step ms (p95) | plan | send | rank 0 | reply | sample | deliver |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    results = {}
    for rows in args.rows:
        steps = measure(rows, args.steps, args.vocab)
        results[rows] = statistics.median(steps.own_ms)
        aim = f"under {AIMS_MS[rows]:g}" if rows in AIMS_MS else ""
        cells = " | ".join(f"{statistics.median(steps.phases_ms[name]):.3f}" for name in PHASES)
        print(f"| {rows} | {_text(steps.own_ms)} | {aim} | {_text(steps.whole_ms)} | {cells} |")
    write_results("head", results)


def _text(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({percentile(values, 95):.3f})"


def measure(rows: int, num_steps: int, vocab_size: int) -> Steps:
    """Decode steps of `rows` sequences."""
    engine, transport = _engine(rows, num_steps, vocab_size)
    params = TokenParams(temperature=0.0, max_tokens=_length(num_steps) - PROMPT_TOKENS, ignore_eos=True)
    for number in range(rows):
        engine.submit([RequestId(number)], tuple(range(PROMPT_TOKENS)), params)
    counters = engine.counters.of_command(Cmd.DECODE if rows == 1 else Cmd.DECODE_BATCH)
    while engine.scheduler.num_waiting or not counters.by_status:
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    steps = Steps([], [], {name: [] for name in PHASES})
    for _ in range(num_steps):
        _time_step(engine, transport, counters, steps)
    return steps


def _time_step(engine: Engine, transport: AnsweringTransport, counters: CommandCounters, steps: Steps) -> None:
    before = {name: getattr(counters, name) for name in PHASES}
    worker_s, began_s = transport.worker_s, time.perf_counter()
    engine.step()
    took_s = time.perf_counter() - began_s
    worker_s = transport.worker_s - worker_s
    phases_s = {name: getattr(counters, name) - before[name] for name in PHASES}
    phases_s["send_s"] -= worker_s  # it carries a command out when it gets it
    steps.whole_ms.append(1e3 * (took_s - worker_s))
    steps.own_ms.append(1e3 * (took_s - worker_s - phases_s["run_s"] - phases_s["sample_s"]))
    for name, seconds in phases_s.items():
        steps.phases_ms[name].append(1e3 * seconds)


def _length(num_steps: int) -> int:
    """Tokens that a sequence may get to: none ends before the last step."""
    return PROMPT_TOKENS + num_steps + WARM_UP + MORE_TOKENS


def _engine(rows: int, num_steps: int, vocab_size: int) -> tuple[Engine, AnsweringTransport]:
    length = _length(num_steps)
    num_blocks = rows * -(-length // BLOCK_SIZE)
    limits = SlotLimits(max(rows, 2), length, max(512, rows), vocab_size, BLOCK_SIZE)
    worker, _ = null_replica(1, None, vocab_size, limits)
    transport = AnsweringTransport(worker, VERSION)
    link = HeadLink(Rank(1), transport, VERSION, EPOCH)
    link.expect_hello(1.0)
    link.welcome(Welcome(VERSION, EPOCH, ""))
    session = HeadSession(VERSION, EPOCH)
    replica, model = null_replica(0, HeadPort(session, [link]), vocab_size, limits)
    engine = Engine(
        replica,
        model,
        session,
        [link],
        VERSION,
        step_timeout_s=10.0,
        seed=0,
        eos_token_ids=frozenset({2}),
        deliver=lambda deliveries: None,
    )
    scheduler = Scheduler(SchedulerLimits(max(rows, 2), length, max(512, rows), num_blocks, BLOCK_SIZE))
    engine.start(scheduler, num_blocks, lambda rank, progress: None)
    return engine, transport


if __name__ == "__main__":
    main()
