# SPDX-License-Identifier: MIT OR Apache-2.0
"""A whole engine in one process: head and workers as threads under one baton, over the memory transport.

Everything is the real part but the wire and the clock: commands are encoded and decoded, ranks are `Worker`s, sums run
in rank order. A seed gives the order in which ranks run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metrale_ray.baton import Baton
from metrale_ray.config import EngineConfig
from metrale_ray.engine import Delivery, Engine
from metrale_ray.errors import MetraleError
from metrale_ray.grammar.constraint import Constraint
from metrale_ray.model.collectives import Collectives, InProcess, InProcessGroup, OneRank
from metrale_ray.model.ranks import RankSetup, open_rank
from metrale_ray.protocol.commands import Rank
from metrale_ray.protocol.journal.journal import Journal, MemoryJournal
from metrale_ray.protocol.link import HeadLink, WorkerLink
from metrale_ray.protocol.transport import memory_pair
from metrale_ray.recording import Recording
from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.scheduler.request import RequestId
from metrale_ray.start import shake_hands, start_engine
from metrale_ray.worker import Worker
from tests.journals import remember

GREEDY = TokenParams(temperature=0, max_tokens=8, ignore_eos=True)
EPOCH = 1


@dataclass
class Answer:
    """What one sequence got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    error: tuple[str, str] | None = None
    answers: int = 0  # how often it was told that it has ended


@dataclass
class Outcome:
    """The end of a run: what each request got, and how each rank left (an exception, or None)."""

    answers: dict[int, Answer]
    stats: dict[str, Any]
    left: dict[str, Any]
    head_error: BaseException | None = None

    def tokens(self) -> list[list[int]]:
        return [self.answers[i].token_ids for i in sorted(self.answers)]


class Driver:
    """The head's side of a run: submit, step, look. Handed to the test's script, which runs on the head's thread."""

    def __init__(self, engine: Engine, answers: dict[int, Answer]) -> None:
        self.engine = engine
        self.answers = answers
        self._next = 0

    def submit(
        self,
        prompt: Sequence[int],
        params: TokenParams = GREEDY,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        constraint: Constraint | None = None,
    ) -> int:
        """The number of the first of `params.n` sequences; the others have the numbers that follow."""
        number, self._next = self._next, self._next + params.n
        request_ids = [RequestId(number + index) for index in range(params.n)]
        self.answers.update((request_id, Answer()) for request_id in request_ids)
        self.engine.submit(
            request_ids, tuple(prompt), params, priority=priority, deadline_s=deadline_s, constraint=constraint
        )
        return number

    def run(self, max_steps: int = 10_000) -> None:
        """Step until there is nothing left to do."""
        for _ in range(max_steps):
            if not self.engine.step():
                return
        raise AssertionError(f"still at work after {max_steps} steps")


Script = Callable[[Driver], None]


def run_engine(
    model: Path | str,
    script: Script,
    *,
    ep_size: int = 1,
    seed: int = 0,
    dtype: str = "float32",
    journal: Journal | None = None,
    **settings: Any,
) -> Outcome:
    """Run `script` against an engine of `ep_size` ranks, then shut it down, and say how everything ended."""
    config = EngineConfig(model=str(model), ep_size=ep_size, dtype=dtype, device="cpu", **settings).resolved({})
    baton = Baton(seed)
    group = InProcessGroup(baton, ep_size)
    answers: dict[int, Answer] = {}
    pairs = {rank: memory_pair(baton, "head", f"rank {rank}") for rank in range(1, ep_size)}
    stats: dict[str, Any] = {}

    def join(setup: RankSetup, link: WorkerLink | None = None) -> Collectives:
        sizes = (config.max_num_batched_tokens, setup.decoder.hidden_size, setup.dtype)
        if ep_size == 1:
            return OneRank(0, 1, *sizes, "cpu")
        return InProcess(group, setup.rank, *sizes, timeout_s=config.step_timeout_s)

    def head() -> None:
        links = [HeadLink(Rank(r), ends[0], config.protocol_version, EPOCH) for r, ends in pairs.items()]
        setup = open_rank(config, 0)
        collectives: Collectives | None = None
        try:
            met = shake_hands(setup, links, EPOCH)
            collectives = join(setup)
            engine = start_engine(
                setup,
                links,
                collectives,
                met,
                epoch=EPOCH,
                deliver=_into(answers),
                on_load=lambda r, p: None,
                recording=Recording(remember(MemoryJournal()) if journal is None else journal),
            )
            script(Driver(engine, answers))
            stats.update(engine.stats())
            engine.shutdown()
        finally:
            if collectives is not None:
                collectives.close()
            for link in links:
                link.close()

    def worker(rank: int) -> Callable[[], None]:
        return lambda: Worker(config, rank, "memory", keep=lambda *_: None).serve(pairs[rank][1], join)

    tasks: Mapping[str, Callable[[], Any]] = {"head": head} | {f"rank {r}": worker(r) for r in pairs}
    left = baton.run(tasks)
    head_error = left.pop("head")
    if head_error is not None and not isinstance(head_error, MetraleError):
        raise head_error
    return Outcome(answers, stats, left, head_error)


def _into(answers: dict[int, Answer]) -> Callable[[list[Delivery]], None]:
    def deliver(deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            answer = answers[delivery.request_id]
            assert answer.finish_reason is None, "a token or an end after the end"
            answer.token_ids += delivery.token_ids
            answer.logprobs += delivery.logprobs
            answer.prompt_logprobs += delivery.prompt_logprobs
            if delivery.finish_reason is not None:
                answer.answers += 1
                answer.finish_reason, answer.error = delivery.finish_reason, delivery.error

    return deliver
