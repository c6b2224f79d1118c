# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Engine`: one step of the head. Decides, orders every rank, judges the replies, samples, delivers.

Rules. One thread makes every call. A token is delivered only after every rank has said OK to its step. A failed
command settles nothing, and only the sequence that it belongs to is failed (`scheduler.blame` finds it). LinkLost and
Desync pass through to the caller, who ends the engine.

It leaves out threads, sockets of fronts, and Ray: `head` has them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from metrale_ray.errors import EpCommandFailed, LinkLost, RequestError, SlotPoisoned, StartError
from metrale_ray.model.contract.model import Model
from metrale_ray.model.execute import Replica
from metrale_ray.protocol.commands import (
    Command,
    Decode,
    FreeSlot,
    Load,
    Logits,
    Ping,
    Progress,
    Rank,
    Shutdown,
    Slot,
    command_rows,
)
from metrale_ray.protocol.link import HeadLink
from metrale_ray.protocol.session import HeadSession
from metrale_ray.protocol.verdict import Kind, Verdict, judge
from metrale_ray.protocol.versions import ProtocolVersion
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.sampling.sampler import SampleError, SampleRow, sample
from metrale_ray.scheduler.blame import BlameSearch
from metrale_ray.scheduler.plan import Plan, PlanRow, plan_command
from metrale_ray.scheduler.request import Request, RequestId
from metrale_ray.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

# A command without rows is tried this often; when it still fails, its rank is at fault.
ROWLESS_TRIES = 2
# A search for the failing row that takes more steps than this ends with the rank at fault.
MAX_BLAME_STEPS = 64


FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one request gets from one step. `error` is (code, message) and comes with finish reason "error"."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_token_id: int | None = None
    error: tuple[str, str] | None = None


@dataclass(slots=True)
class _Live:
    """What the engine knows of a request that is not answered yet."""

    params: SamplingParams
    seed: int
    was_poisoned: bool = False


@dataclass(slots=True)
class Counters:
    """Counts since start. Steps are commands with rows that succeeded."""

    commands: int = 0
    steps: int = 0
    tokens: int = 0
    failed_commands: int = 0
    failed_requests: int = 0
    finished_requests: int = 0
    by_failure: dict[str, int] = field(default_factory=dict)


class Engine:
    """The step loop's body over rank 0's replica and one link per worker."""

    def __init__(
        self,
        replica: Replica,
        model: Model,
        session: HeadSession,
        links: Sequence[HeadLink],
        version: ProtocolVersion,
        *,
        step_timeout_s: float,
        seed: int,
        deliver: Callable[[list[Delivery]], None],
    ) -> None:
        self.counters = Counters()
        self._replica = replica
        self._model = model
        self._session = session
        self._links = links
        self._version = version
        self._step_timeout_s = step_timeout_s
        self._seed = seed
        self._deliver = deliver
        self._scheduler: Scheduler | None = None
        self._live: dict[RequestId, _Live] = {}
        self._search: BlameSearch | None = None
        self._failures: dict[RequestId, Verdict] = {}  # during a search: the last failed step of each row

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler; there is one once `start` has been called."""
        if self._scheduler is None:
            raise AssertionError("the engine has not started")
        return self._scheduler

    def start(
        self, scheduler: Scheduler, num_blocks: int, on_progress: Callable[[Rank, Progress], None] | None = None
    ) -> None:
        """Load every rank's shard. Raises StartError naming the rank and its reason, or LinkLost."""
        verdict = self._order(Load(num_blocks), on_progress)
        if not verdict.ok:
            raise StartError(f"rank {verdict.rank} could not load: {verdict.message}", rank=verdict.rank)
        self._scheduler = scheduler

    def submit(self, request: Request, params: SamplingParams) -> None:
        """Take a request. Raises RequestError at once when it can never be served, or not now."""
        _check_vocabulary(request, params, self._model.vocab_size)
        self.scheduler.add(request)
        seed = params.seed if params.seed is not None else _derived_seed(self._seed, request.request_id)
        self._live[request.request_id] = _Live(params, seed)

    def abort(self, request_id: RequestId) -> None:
        """End a request whose client has gone, or whose text has ended; nothing is delivered for it any more."""
        if self._live.pop(request_id, None) is not None:
            self.scheduler.abort(request_id)
            if self._search is not None:
                self._search.drop(request_id)

    def finish(self, request_id: RequestId) -> None:
        """End a request whose text ended at a stop string: like `abort`, and counted as finished."""
        if self._live.pop(request_id, None) is not None:
            self.scheduler.finish(request_id)
            self.counters.finished_requests += 1
            if self._search is not None:
                self._search.drop(request_id)

    def step(self) -> bool:
        """Do the next piece of work, if there is one, and say whether there was. Raises LinkLost or Desync."""
        if self._search is not None:
            self._continue_search(self._search)
            return True
        plan = self.scheduler.next_step()
        if plan is None:
            return False
        self._free(plan.frees)
        if plan.rows:
            self._run_plan(plan)
        return True

    def ping(self) -> None:
        """Ask every rank for its digest. Raises LinkLost or Desync."""
        self._order_rowless(Ping())

    def shutdown(self) -> None:
        """Let every worker leave its loop. Raises LinkLost or Desync."""
        self._order(Shutdown())

    def stats(self) -> dict[str, Any]:
        """Gauges and counters, as plain numbers."""
        scheduler = self.scheduler
        return {
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "free_blocks": scheduler.num_free_blocks,
            "total_blocks": scheduler.num_total_blocks,
            "preemptions": scheduler.num_preemptions,
            "commands": self.counters.commands,
            "steps": self.counters.steps,
            "tokens": self.counters.tokens,
            "failed_commands": self.counters.failed_commands,
            "failed_requests": self.counters.failed_requests,
            "finished_requests": self.counters.finished_requests,
            "failures_by_kind": dict(self.counters.by_failure),
            "digest": self._replica.slots.digest.hex(),
        }

    # One command ---------------------------------------------------------------------------------------------------

    def _order(self, command: Command, on_progress: Callable[[Rank, Progress], None] | None = None) -> Verdict:
        """Run one command on every rank and judge it."""
        frame = self._broadcast(command)
        replies = [self._replica.run(frame)]
        for link in self._links:
            replies.append(link.collect(frame, self._step_timeout_s, _progress_of(link, on_progress)))
        verdict = judge(frame, replies)
        self._session.settle(verdict.ok)
        self.counters.commands += 1
        if not verdict.ok:
            self._note_failure(verdict)
        return verdict

    def _broadcast(self, command: Command) -> Any:
        ep = self._model.ep
        match command:
            case FreeSlot(slot):
                return ep.ep_broadcast_cmd_for_seq(command, slot)
            case Decode(row):
                return ep.ep_broadcast_cmd_for_seq(command, row.slot)
            case _ if command_rows(command):
                return ep.ep_broadcast_tokens(command)  # type: ignore[arg-type]  # the ones with rows are these
            case _:
                return ep.ep_broadcast_cmd(command)

    def _note_failure(self, verdict: Verdict) -> None:
        self.counters.failed_commands += 1
        kind = verdict.kind.value
        self.counters.by_failure[kind] = self.counters.by_failure.get(kind, 0) + 1
        log.warning("a command was %s by rank %s: %s", kind, verdict.rank, verdict.message)

    def _order_rowless(self, command: Command) -> None:
        """Run a command without rows until it succeeds; one that keeps failing is its rank's fault."""
        for _ in range(ROWLESS_TRIES):
            verdict = self._order(command)
            if verdict.ok:
                return
        raise LinkLost(
            f"rank {verdict.rank} fails {command.code.name.lower()} again and again: {verdict.message}",
            rank=verdict.rank,
        )

    def _free(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._order_rowless(FreeSlot(slot))

    # One step ------------------------------------------------------------------------------------------------------

    def _run_plan(self, plan: Plan) -> None:
        verdict = self._run_rows(plan.rows)
        if verdict.ok:
            return
        self.scheduler.step_failed(plan)
        self._search = BlameSearch(plan.rows, MAX_BLAME_STEPS)
        self._search.failed(verdict.rank or 0, verdict.slots)
        self._conclude(self._search)

    def _run_rows(self, rows: Sequence[PlanRow]) -> Verdict:
        verdict = self._order(plan_command(rows, self._version))
        if verdict.ok:
            self.counters.steps += 1
            self._answer(Plan((), tuple(rows)))
        else:
            self._failures.update((row.request_id, verdict.of_slot(row.span.slot)) for row in rows)
        return verdict

    def _answer(self, plan: Plan) -> None:
        """Sample for the rows that give a token, extend or finish their sequences, and deliver."""
        deliveries: list[Delivery] = []
        token_ids = self._sample(plan.rows, deliveries)
        for emission in self.scheduler.apply(plan, token_ids):
            deliveries.append(
                Delivery(emission.request_id, (emission.token_id,), emission.finish_reason, emission.stop_token_id)
            )
            if emission.finish_reason is not None:
                self._live.pop(emission.request_id, None)
                self.counters.finished_requests += 1
        self.counters.tokens += len(token_ids)
        if deliveries:
            self._deliver(deliveries)

    def _sample(self, rows: Sequence[PlanRow], deliveries: list[Delivery]) -> dict[RequestId, int]:
        picked = [(index, row) for index, row in _last_logits(rows) if row.samples and row.request_id in self._live]
        if not picked or self._replica.logits is None:
            return {}
        logits_RV = self._replica.logits[[index for index, _ in picked]]
        samples = sample(logits_RV, [self._sample_row(row) for _, row in picked])
        token_ids: dict[RequestId, int] = {}
        for (_, row), result in zip(picked, samples, strict=True):
            if isinstance(result, SampleError):
                deliveries.append(self._fail(row.request_id, "sampling_failed", str(result)))
            else:
                token_ids[row.request_id] = result.token_id
        return token_ids

    def _sample_row(self, row: PlanRow) -> SampleRow:
        live = self._live[row.request_id]
        return SampleRow(params=live.params, seed=live.seed, sequence_index=0, position=row.span.end)

    def _fail(self, request_id: RequestId, code: str, message: str) -> Delivery:
        self._live.pop(request_id, None)
        self.scheduler.fail(request_id)
        self.counters.failed_requests += 1
        return Delivery(request_id, (), "error", error=(code, message))

    # A failed step -------------------------------------------------------------------------------------------------

    def _continue_search(self, search: BlameSearch) -> None:
        rows = search.next_rows()
        if rows is not None:
            rows = tuple(sorted(rows, key=lambda row: not row.is_decode))  # decode rows come first in a command
            verdict = self._run_rows(rows)
            if verdict.ok:
                search.succeeded()
            else:
                search.failed(verdict.rank or 0, verdict.slots)
        self._conclude(search)

    def _conclude(self, search: BlameSearch) -> None:
        verdict = search.verdict
        if verdict is None:
            return
        failures, self._failures, self._search = self._failures, {}, None
        if verdict.rank_at_fault is not None:
            said = [failure.message for failure in failures.values() if failure.rank == verdict.rank_at_fault]
            raise LinkLost(
                f"rank {verdict.rank_at_fault} fails whatever it is given: {said[-1] if said else 'no reason given'}",
                rank=verdict.rank_at_fault,
            )
        if verdict.nobody:
            self.scheduler.failure_unexplained()
        failed = [self._punish(request_id, failures[request_id]) for request_id in verdict.guilty]
        answers = [delivery for delivery in failed if delivery is not None]
        if answers:
            self._deliver(answers)

    def _punish(self, request_id: RequestId, failure: Verdict) -> Delivery | None:
        """Fail a request; one whose slot was poisoned is first freed on every rank and prefilled anew, once."""
        live = self._live.get(request_id)
        if live is None:
            return None  # its client has gone meanwhile
        if failure.kind is Kind.POISONED and not live.was_poisoned:
            live.was_poisoned = True
            self.scheduler.requeue(request_id)
            return None
        return self._fail(request_id, _client_code(failure), failure.message)


def check_links(links: Sequence[HeadLink]) -> None:
    """Raise LinkLost if a worker has gone. Cheap."""
    for link in links:
        reason = link.lost()
        if reason is not None:
            raise LinkLost(f"rank {link.rank}: {reason}", rank=link.rank)


def _check_vocabulary(request: Request, params: SamplingParams, vocab_size: int) -> None:
    """The head sends nothing that a rank would refuse. Raises RequestError."""
    for param, ids in (("prompt_token_ids", request.prompt_token_ids), ("stop_token_ids", params.stop_token_ids)):
        if ids and max(ids) >= vocab_size:
            raise RequestError(
                f"{param} holds {max(ids)}; token ids of this model are 0 to {vocab_size - 1}. "
                "Use the checkpoint's own tokenizer.",
                param=param,
            )


def _last_logits(rows: Sequence[PlanRow]) -> list[tuple[int, PlanRow]]:
    """The index, among the step's logits, of each row's last position; rows without logits are left out."""
    found, index = [], 0
    for row in rows:
        index += {Logits.NONE: 0, Logits.LAST: 1, Logits.ALL: len(row.span.token_ids)}[row.span.logits]
        if row.span.logits is not Logits.NONE:
            found.append((index - 1, row))
    return found


def _client_code(verdict: Verdict) -> str:
    """What the client is told: that its command was refused, or that it failed."""
    match verdict.kind:
        case Kind.REJECTED:
            return verdict.code
        case Kind.POISONED:
            return SlotPoisoned.code
        case _:
            return EpCommandFailed.code


def _progress_of(
    link: HeadLink, on_progress: Callable[[Rank, Progress], None] | None
) -> Callable[[Progress], None] | None:
    if on_progress is None:
        return None
    return lambda progress: on_progress(Rank(link.rank), progress)


def _derived_seed(seed: int, request_id: RequestId) -> int:
    """A request's own seed where it gave none: the same for the same engine seed and order of requests."""
    text = f"{seed}:{request_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
