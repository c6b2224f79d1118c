# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Engine`: one step of the head. Decides, orders every rank, judges the replies, samples, delivers.

Rules. One thread makes every call. A token is delivered only after every rank has said OK to its step. A failed
command settles nothing, and only the sequence that it belongs to is failed (`scheduler.blame` finds it). LinkLost and
Desync pass through to the caller, who ends the engine. A client's request for n sequences is n requests here, taken or
refused as a whole; from then on each goes its own way.

It leaves out threads, sockets of fronts, Ray and the clock: `head` has them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from metrale_ray.errors import EpCommandFailed, LinkLost, SlotPoisoned, StartError
from metrale_ray.live import LiveRequest
from metrale_ray.model.contract.model import Model
from metrale_ray.model.execute import Replica
from metrale_ray.protocol.commands import (
    Command,
    Decode,
    FreeSlot,
    Load,
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
from metrale_ray.readout import read_out
from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.scheduler.blame import BlameSearch
from metrale_ray.scheduler.deadlines import Deadlines
from metrale_ray.scheduler.plan import Plan, PlanRow, plan_command
from metrale_ray.scheduler.request import Request, RequestId
from metrale_ray.scheduler.scheduler import Scheduler
from metrale_ray.vocabulary import check_vocabulary, within

log = logging.getLogger(__name__)

# A command without rows is tried this often; when it still fails, its rank is at fault.
ROWLESS_TRIES = 2
# A search for the failing row that takes more steps than this ends with the rank at fault.
MAX_BLAME_STEPS = 64


_TOO_LATE = (
    "the request's timeout_s passed before it ended, while it waited or ran; the tokens so far are good. Give it more "
    "time, ask for fewer tokens, or send it with a lower priority number."
)

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one request gets from one step. `error` is (code, message) and comes with finish reason "error".

    `logprobs` is empty or one per token; `prompt_logprobs` are those of the prompt positions that the step computed.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_token_id: int | None = None
    error: tuple[str, str] | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(slots=True)
class Counters:
    """Counts since start. Steps are commands with rows that succeeded. Requests that expired have failed too."""

    commands: int = 0
    steps: int = 0
    tokens: int = 0
    failed_commands: int = 0
    failed_requests: int = 0
    expired_requests: int = 0
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
        eos_token_ids: frozenset[int],
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
        self._eos_token_ids = eos_token_ids
        self._live: dict[RequestId, LiveRequest] = {}
        self._deadlines = Deadlines()
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

    def submit(
        self,
        request_ids: Sequence[RequestId],
        prompt_token_ids: tuple[int, ...],
        params: TokenParams,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> None:
        """Take a client's request, one id for each of its `params.n` sequences; ids are never used again.

        `deadline_s` is a time of the clock that `expire` is told. Raises RequestError at once, and takes none of the
        sequences, when they can never be served, or not now.
        """
        vocab_size = self._model.vocab_size
        check_vocabulary(prompt_token_ids, params, vocab_size)
        eos = within(self._eos_token_ids.union(params.end_token_ids), vocab_size)
        stops = frozenset(params.stop_token_ids)
        ends = stops if params.ignore_eos else stops | eos
        max_tokens = params.max_tokens if params.max_tokens is not None else self.scheduler.limits.max_model_len
        wants_prompt = params.prompt_logprobs is not None and len(prompt_token_ids) > 1
        self.scheduler.add(
            *(
                Request(request_id, prompt_token_ids, max_tokens, ends, wants_prompt and index == 0, priority)
                for index, request_id in enumerate(request_ids)
            )
        )
        seed = params.seed if params.seed is not None else _derived_seed(self._seed, request_ids[0])
        for index, request_id in enumerate(request_ids):
            self._live[request_id] = LiveRequest(prompt_token_ids, params, seed, index, stops | eos)
            if deadline_s is not None:
                self._deadlines.add(request_id, deadline_s)

    def abort(self, request_id: RequestId) -> None:
        """End a request whose client has gone, or whose text has ended; nothing is delivered for it any more."""
        if self._forget(request_id):
            self.scheduler.abort(request_id)

    def finish(self, request_id: RequestId) -> None:
        """End a request whose text ended at a stop string: like `abort`, and counted as finished."""
        if self._forget(request_id):
            self.scheduler.finish(request_id)
            self.counters.finished_requests += 1

    def expire(self, now_s: float) -> None:
        """Fail the requests whose deadline has come, whether they wait or run, and tell them so.

        Between any two steps, those of a search for a failing row included. What they hold is freed by the next step.
        """
        late = self._deadlines.take_late(now_s)
        if late:
            self.counters.expired_requests += len(late)
            self._deliver([self._fail(request_id, "deadline_exceeded", _TOO_LATE) for request_id in late])

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
            "expired_requests": self.counters.expired_requests,
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
            self._answer(rows)
        else:
            self._failures.update((row.request_id, verdict.of_slot(row.span.slot)) for row in rows)
        return verdict

    def _answer(self, rows: Sequence[PlanRow]) -> None:
        """Sample for the rows that give a token, extend or finish their sequences, and deliver."""
        readout = read_out(self._replica.logits, rows, self._live)
        self._replica.logits = None  # they are large, and have been read
        prompt, sampled = readout.prompt, readout.sampled
        deliveries = [
            self._fail(request_id, error.code, error.message, prompt.pop(request_id, ()))
            for request_id, error in readout.errors.items()
        ]
        token_ids = {request_id: each.token_id for request_id, each in sampled.items()}
        for emission in self.scheduler.apply(Plan((), tuple(rows)), token_ids):
            request_id = emission.request_id
            self._live[request_id].note(emission.token_id)
            logprobs = sampled[request_id].logprobs
            deliveries.append(
                Delivery(
                    request_id,
                    (emission.token_id,),
                    emission.finish_reason,
                    emission.stop_token_id,
                    None,
                    () if logprobs is None else (logprobs,),
                    prompt.pop(request_id, ()),
                )
            )
            if emission.finish_reason is not None:
                self._forget(request_id)
                self.counters.finished_requests += 1
        deliveries += [Delivery(request_id, (), None, prompt_logprobs=some) for request_id, some in prompt.items()]
        self.counters.tokens += len(token_ids)
        if deliveries:
            self._deliver(deliveries)

    def _fail(
        self, request_id: RequestId, code: str, message: str, prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> Delivery:
        self._forget(request_id)
        self.scheduler.fail(request_id)
        self.counters.failed_requests += 1
        return Delivery(request_id, (), "error", error=(code, message), prompt_logprobs=prompt_logprobs)

    def _forget(self, request_id: RequestId) -> bool:
        """The request has ended; False when it was not here."""
        if self._live.pop(request_id, None) is None:
            return False
        self._deadlines.drop(request_id)
        if self._search is not None:
            self._search.drop(request_id)
        return True

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
