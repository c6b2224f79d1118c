# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Engine`: one step of the head. Decides, orders every rank, judges the replies, samples, delivers.

Rules. One thread makes every call. A token is delivered only after every rank has said OK to its step. A failed
command settles nothing, and only the sequence that it belongs to is failed (`scheduler.blame` finds it). LinkLost and
Desync pass through to the caller, who ends the engine. A client's request for n sequences is n requests here, taken or
refused as a whole; from then on each goes its own way.

It leaves out threads, sockets of fronts and Ray: `head` has them. The clock is read for the figures alone: what time
decides, such as `expire`, is told.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metrale_ray.clock import Clock
from metrale_ray.counters import CommandCounters, Counters
from metrale_ray.errors import StartError
from metrale_ray.grammar.constraint import Constraint
from metrale_ray.live import LiveRequest, check_constraint
from metrale_ray.model.contract.model import Model
from metrale_ray.model.execute import Replica
from metrale_ray.model.scrubbing import Scrubbing
from metrale_ray.orders import OnProgress, Orders
from metrale_ray.protocol.commands import Cmd, FreeSlot, Load, Ping, Shutdown, Slot
from metrale_ray.protocol.journal.records import probes
from metrale_ray.protocol.link import HeadLink
from metrale_ray.protocol.session import HeadSession
from metrale_ray.protocol.verdict import Verdict
from metrale_ray.protocol.versions import ProtocolVersion
from metrale_ray.readout import Readout, read_out
from metrale_ray.recording import Recording
from metrale_ray.recovery import Recovery
from metrale_ray.sampling.history import DistinctTokens
from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.sampling.noted_logits import NotedLogits
from metrale_ray.sampling.sampler import BAD_LOGITS
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.scheduler.deadlines import Deadlines
from metrale_ray.scheduler.plan import Plan, PlanRow, plan_command
from metrale_ray.scheduler.request import FinishReason, Request, RequestId
from metrale_ray.scheduler.scheduler import Emission, Scheduler
from metrale_ray.timelines import Timelines
from metrale_ray.vocabulary import check_vocabulary, within

_TOO_LATE = (
    "the request's timeout_s passed before it ended, while it waited or ran; the tokens so far are good. Give it more "
    "time, ask for fewer tokens, or send it with a lower priority number."
)

COMPARE_S = 2.0
"""How long the caches of rows whose logits are not finite are looked at: some hundred scrubs, of 512 rows each."""

_DECODES = (Cmd.DECODE, Cmd.DECODE_BATCH)  # no row of these is a sequence's first


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
        clock: Clock = time.monotonic,
        recording: Recording | None = None,
    ) -> None:
        self._clock = clock
        self.recording = Recording(clock=clock) if recording is None else recording
        self.counters = Counters()
        self.timelines = Timelines()
        self._orders = Orders(replica, model, session, links, step_timeout_s, self.counters, clock, self.recording)
        self._replica = replica
        self._session = session
        self._model = model
        self._vocab_size = model.vocab_size
        self._version = version
        self._is_alone = not links
        self._seed = seed
        self._deliver = deliver
        self._scheduler: Scheduler | None = None
        self._eos_token_ids = eos_token_ids
        self._live: dict[RequestId, LiveRequest] = {}
        self._deadlines = Deadlines()
        self._recovery = Recovery(self._live)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler; there is one once `start` has been called."""
        if self._scheduler is None:
            raise AssertionError("the engine has not started")
        return self._scheduler

    def start(self, scheduler: Scheduler, num_blocks: int, on_progress: OnProgress | None = None) -> None:
        """Load every rank's shard. Raises StartError naming the rank and its reason, or LinkLost."""
        verdict = self._orders.run(Load(num_blocks), on_progress)
        if not verdict.ok:
            raise StartError(f"rank {verdict.rank} could not load: {verdict.message}", rank=verdict.rank)
        self._scrubbing = Scrubbing(self._model.num_scrub_parts)
        self._scheduler = scheduler

    def submit(
        self,
        request_ids: Sequence[RequestId],
        prompt_token_ids: tuple[int, ...],
        params: TokenParams,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        arrived_s: float | None = None,
        constraint: Constraint | None = None,
        client: tuple[int, int] = (0, 0),
    ) -> None:
        """Take a client's request, one id for each of its `params.n` sequences; ids are never used again.

        `deadline_s` is a time of the clock that `expire` is told. `arrived_s`: when the head got it (monotonic clock),
        for the figures; None: now. `constraint` is what `params.grammar` was compiled to; each sequence gets a copy.
        `client`: the front and its number of the request, for the journal; 0, 0 where there is no front.
        Raises RequestError at once, and takes none of the sequences, when they can never be served, or not now.
        """
        vocab_size = self._vocab_size
        check_vocabulary(prompt_token_ids, params, vocab_size)
        eos = within(self._eos_token_ids.union(params.end_token_ids), vocab_size)
        stops = frozenset(params.stop_token_ids)
        ends = stops if params.ignore_eos and constraint is None else stops | eos
        check_constraint(params, constraint, eos)
        wants_prompt = params.prompt_logprobs is not None and len(prompt_token_ids) > 1
        self.scheduler.add(
            *(
                Request(request_id, prompt_token_ids, params.max_tokens, ends, wants_prompt and index == 0, priority)
                for index, request_id in enumerate(request_ids)
            )
        )
        seed = params.seed if params.seed is not None else _derived_seed(self._seed, request_ids[0])
        arrived_s = self._clock() if arrived_s is None else arrived_s
        self.timelines.arrived(request_ids, len(prompt_token_ids), arrived_s)
        left_s = None if deadline_s is None else deadline_s - arrived_s
        self.recording.admitted(request_ids, client, prompt_token_ids, params, seed, priority, left_s)
        distinct = DistinctTokens(prompt_token_ids)
        for index, request_id in enumerate(request_ids):
            own = None if constraint is None else constraint.copy(eos, goes_on=params.ignore_eos)
            self._live[request_id] = LiveRequest(prompt_token_ids, params, seed, index, stops | eos, distinct, own)
            if deadline_s is not None:
                self._deadlines.add(request_id, deadline_s)

    def abort(self, request_id: RequestId) -> None:
        """End a request whose client has gone, or whose text has ended; nothing is delivered for it any more."""
        if self._forget(request_id, "abort"):
            self.scheduler.abort(request_id)

    def finish(self, request_id: RequestId) -> None:
        """End a request whose text ended at a stop string: like `abort`, and counted as finished."""
        if self._forget(request_id, "stop"):
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
        if self.recording.wants_snapshot():
            self._record_snapshot()
        if self._recovery.is_under_way:
            self._continue_search()
            return True
        began_s = self._clock()
        plan = self.scheduler.next_step()
        if plan is None:
            return False
        plan_s = self._clock() - began_s
        self._free(plan.frees)
        if plan.rows:
            self._run_plan(plan, plan_s)
        return True

    def ping(self) -> None:
        """Ask every rank for its digest. Raises LinkLost or Desync."""
        self._orders.run_rowless(Ping())

    def scrub(self) -> bool:
        """Let every rank look at the next part of its memory; whether that was the last of all parts.

        Raises LinkLost, or Desync for a rank whose memory is damaged.
        """
        scrubbing = self._scrubbing
        num_passes = scrubbing.num_passes
        held = [(sequence.slot, sequence.num_computed) for sequence in self.scheduler.sequences()]
        self._orders.run(scrubbing.next({slot: length for slot, length in held if slot is not None and length}))
        return scrubbing.num_passes > num_passes

    def shutdown(self) -> None:
        """Let every worker leave its loop. Raises LinkLost or Desync."""
        self._orders.run(Shutdown())

    def stats(self) -> dict[str, Any]:
        """Gauges and counters, as plain numbers. From any thread."""
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
            "digest": self.digest,
        }

    @property
    def digest(self) -> str:
        """Rank 0's digest of the settled state, in hexadecimal. From any thread."""
        return self._replica.slots.digest.hex()

    def expert_tokens(self) -> list[int]:
        """For how many tokens each expert was chosen. From any thread."""
        return self._model.expert_tokens()

    # One step ------------------------------------------------------------------------------------------------------

    def _free(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._orders.run_rowless(FreeSlot(slot))

    def _run_plan(self, plan: Plan, plan_s: float) -> None:
        verdict = self._run_rows(plan.rows, plan_s)
        if not verdict.ok:
            self.scheduler.step_failed(plan)
            self._recovery.begin(plan.rows, verdict)
            self._fail_guilty()

    def _continue_search(self) -> None:
        rows = self._recovery.next_rows()
        if rows is not None:
            self._recovery.ran(rows, self._run_rows(rows))
        self._fail_guilty()

    def _fail_guilty(self) -> None:
        deliveries = [self._fail(*guilty) for guilty in self._recovery.conclude(self.scheduler)]
        if deliveries:
            self._deliver(deliveries)

    def _run_rows(self, rows: Sequence[PlanRow], plan_s: float = 0.0) -> Verdict:
        command = plan_command(rows, self._version)
        if command.code not in _DECODES:
            self.timelines.begin([row.request_id for row in rows if row.span.start == 0], self._clock())
        verdict = self._orders.run(command, None, rows)
        counters = self.counters.of_command(command.code)
        counters.plan_s += plan_s
        if verdict.ok:
            self.counters.steps += 1
            self._answer(rows, counters)
        return verdict

    def _answer(self, rows: Sequence[PlanRow], counters: CommandCounters) -> None:
        """Sample for the rows that give a token, extend or finish their sequences, and deliver."""
        began_s = self._clock()
        readout = read_out(self._replica.logits, rows, self._live)
        token_ids = {request_id: each.token_id for request_id, each in readout.sampled.items()}
        self._record_tokens(readout, token_ids)
        self._replica.logits = None  # they are large, and have been read
        self._compare_caches([row for row in rows if _has_bad_logits(readout, row)])
        sampled_s = self._clock()
        counters.sample_s += sampled_s - began_s
        prompt = readout.prompt
        deliveries = [
            self._fail(request_id, error.code, error.message, prompt.pop(request_id, ()))
            for request_id, error in readout.errors.items()
        ]
        emissions = self.scheduler.apply(Plan((), tuple(rows)), token_ids)
        self.timelines.sampled(token_ids, sampled_s)
        deliveries += [self._delivery(emission, readout) for emission in emissions]
        deliveries += [Delivery(request_id, (), None, prompt_logprobs=some) for request_id, some in prompt.items()]
        self.counters.tokens += len(token_ids)
        if deliveries:
            self._deliver(deliveries)
        counters.deliver_s += self._clock() - sampled_s

    def _compare_caches(self, rows: Sequence[PlanRow]) -> None:
        """Logits that are not finite may come of one rank's damaged memory: look before anything is told.

        For COMPARE_S and one scrub more at most, as all wait. Raises Desync when the ranks' caches differ.
        """
        if self._is_alone or self._version is ProtocolVersion.V1:  # which has no words for it
            return
        until_s = self._clock() + COMPARE_S
        for row in rows:
            for scrub in self._scrubbing.all_of(row.span.slot, row.span.end):
                self._orders.run(scrub)
                if self._clock() >= until_s:
                    return

    def _delivery(self, emission: Emission, readout: Readout) -> Delivery:
        """One token, with what the step read of its request, which is taken out."""
        request_id, token_id, finish_reason, stop_token_id = emission
        if finish_reason is None:
            self._live[request_id].note(token_id)
        else:
            self._forget(request_id, finish_reason)
            self.counters.finished_requests += 1
        logprobs = readout.sampled[request_id].logprobs
        return Delivery(
            request_id,
            (token_id,),
            finish_reason,
            stop_token_id,
            None,
            () if logprobs is None else (logprobs,),
            readout.prompt.pop(request_id, ()),
        )

    def _fail(
        self, request_id: RequestId, code: str, message: str, prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> Delivery:
        self._forget(request_id, "error", code, message)
        self.scheduler.fail(request_id)
        self.counters.failed_requests += 1
        return Delivery(request_id, (), "error", error=(code, message), prompt_logprobs=prompt_logprobs)

    def _forget(self, request_id: RequestId, reason: FinishReason, code: str = "", message: str = "") -> bool:
        """The request has ended; False when it was not here."""
        if self._live.pop(request_id, None) is None:
            return False
        self.timelines.ended(request_id, reason, self._clock())
        self.recording.ended(request_id, reason, code, message)
        self._deadlines.drop(request_id)
        self._recovery.drop(request_id)
        return True

    def _record_tokens(self, readout: Readout, token_ids: Mapping[RequestId, int]) -> None:
        logits_RV = self._replica.logits
        if self.recording.is_on and token_ids and logits_RV is not None:
            rows = [readout.logit_rows[request_id] for request_id in token_ids]
            noted = NotedLogits(logits_RV, rows, list(token_ids.values()), probes(self._vocab_size))
            self.recording.sampled(self._orders.last_seq, token_ids, noted)

    def _record_snapshot(self) -> None:
        settled = self._session.settled
        assert settled is not None, "the ranks have loaded"
        slots = self._replica.slots
        slots.settle(settled)  # as the next command would do first
        self.recording.snapshot(settled.seq, settled.ok, slots.live, self.scheduler.sequences())


def _has_bad_logits(readout: Readout, row: PlanRow) -> bool:
    error = readout.errors.get(row.request_id)
    return error is not None and error.code == BAD_LOGITS


def _derived_seed(seed: int, request_id: RequestId) -> int:
    """A request's own seed where it gave none: the same for the same engine seed and order of requests."""
    text = f"{seed}:{request_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
