# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Orders`: one command to every rank, rank 0 included, and what all replies say of it together.

Rules: a command is sent to the workers before rank 0 carries it out, and judged when all have answered; only then is it
settled. A valid reply out of turn is a Desync of its rank. LinkLost and Desync pass through. It knows nothing of
requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from metrale_ray.clock import Clock
from metrale_ray.counters import CommandCounters, Counters, RankCounters
from metrale_ray.errors import Desync, LinkLost, MetraleError, SessionError
from metrale_ray.last_commands import Heard
from metrale_ray.model.contract.model import Model
from metrale_ray.model.execute import Replica
from metrale_ray.protocol.commands import (
    Command,
    CommandFrame,
    Decode,
    FreeSlot,
    Progress,
    Rank,
    Reply,
    command_rows,
)
from metrale_ray.protocol.link import HeadLink
from metrale_ray.protocol.session import HeadSession
from metrale_ray.protocol.verdict import Verdict, judge
from metrale_ray.recording import Recording
from metrale_ray.scheduler.plan import PlanRow

log = logging.getLogger(__name__)

# A command without rows is tried this often; when it still fails, its rank is at fault.
ROWLESS_TRIES = 2

OnProgress = Callable[[Rank, Progress], None]


class Orders:
    """What the engine orders. `counters` are told of each command."""

    def __init__(
        self,
        replica: Replica,
        model: Model,
        session: HeadSession,
        links: Sequence[HeadLink],
        step_timeout_s: float,
        counters: Counters,
        clock: Clock = time.monotonic,
        recording: Recording | None = None,
    ) -> None:
        self._replica = replica
        self._ep = model.ep
        self._session = session
        self._links = links
        self._step_timeout_s = step_timeout_s
        self._counters = counters
        self._clock = clock
        self._recording = Recording(clock=clock) if recording is None else recording
        counters.by_rank = self._ranks = [RankCounters() for _ in range(len(links) + 1)]

    @property
    def last_seq(self) -> int:
        """The number of the last command; 0 before the first."""
        return self._session.last_seq

    def run(self, command: Command, on_progress: OnProgress | None = None, rows: Sequence[PlanRow] = ()) -> Verdict:
        """Run one command, of these rows if it has some, on every rank and judge it. Raises LinkLost or Desync."""
        counters, kind = self._counters, self._counters.of_command(command.code)
        counters.command = command.code
        try:
            verdict = self._run_timed(command, kind, on_progress, rows)
        except (LinkLost, Desync) as error:
            kind.count("lost" if isinstance(error, LinkLost) else "desync")
            raise
        self._session.settle(verdict.ok)
        counters.commands += 1
        counters.command = None
        kind.count(verdict.kind.value)
        if not verdict.ok:
            self._note_failure(verdict)
        return verdict

    def run_rowless(self, command: Command) -> None:
        """Run a command without rows until it succeeds; one that keeps failing is its rank's fault. Raises LinkLost."""
        for _ in range(ROWLESS_TRIES):
            verdict = self.run(command)
            if verdict.ok:
                return
        raise LinkLost(
            f"rank {verdict.rank} fails {command.code.name.lower()} again and again: {verdict.message}",
            rank=verdict.rank,
        )

    def _run_timed(
        self, command: Command, kind: CommandCounters, on_progress: OnProgress | None, rows: Sequence[PlanRow]
    ) -> Verdict:
        began_s = self._clock()
        frame = self._broadcast(command)
        heard = self._recording.sent(frame, rows)
        try:
            self._hear(heard, kind, began_s, on_progress)
            verdict = self._judge(frame, heard.replies)
        except MetraleError as error:
            self._recording.broke(heard, error)
            raise
        self._recording.heard(heard, verdict)
        return verdict

    def _hear(self, heard: Heard, kind: CommandCounters, began_s: float, on_progress: OnProgress | None) -> None:
        """Carry out rank 0's part and collect the other answers."""
        frame, replies = heard.frame, heard.replies
        sent_s = self._clock()
        replies.append(self._replica.run(frame))
        heard.lags_s.append(0.0)
        ran_s = now_s = self._clock()
        timing = replies[0].timing
        self._ranks[0].note(0.0, timing)
        for link, counters in zip(self._links, self._ranks[1:], strict=True):
            reply = self._collect(link, frame, on_progress)
            now_s = self._clock()
            counters.note(now_s - ran_s, reply.timing)
            heard.lags_s.append(now_s - ran_s)
            replies.append(reply)
        kind.send_s += sent_s - began_s
        kind.run_s += ran_s - sent_s
        kind.reduce_s += timing.waited_us * 1e-6
        kind.reply_s += now_s - ran_s
        self._counters.completed_at_s = now_s

    def _collect(self, link: HeadLink, frame: CommandFrame, on_progress: OnProgress | None) -> Reply:
        """A valid reply that is not to this command shows that its rank is out of step."""
        try:
            return link.collect(frame, self._step_timeout_s, _progress_of(link, on_progress))
        except SessionError as error:
            raise Desync(error.message, rank=link.rank, seq=frame.envelope.seq) from error

    def _judge(self, frame: CommandFrame, replies: Sequence[Reply]) -> Verdict:
        try:
            return judge(frame, replies)
        except Desync:
            self._counters.digest_mismatches += sum(reply.digest != replies[0].digest for reply in replies)
            raise

    def _broadcast(self, command: Command) -> CommandFrame:
        match command:
            case FreeSlot(slot):
                return self._ep.ep_broadcast_cmd_for_seq(command, slot)
            case Decode(row):
                return self._ep.ep_broadcast_cmd_for_seq(command, row.slot)
            case _ if command_rows(command):
                return self._ep.ep_broadcast_tokens(command)  # type: ignore[arg-type]  # the ones with rows are these
            case _:
                return self._ep.ep_broadcast_cmd(command)

    def _note_failure(self, verdict: Verdict) -> None:
        counters, kind = self._counters, verdict.kind.value
        counters.failed_commands += 1
        counters.by_failure[kind] = counters.by_failure.get(kind, 0) + 1
        log.warning("a command was %s by rank %s: %s", kind, verdict.rank, verdict.message)


def check_links(links: Sequence[HeadLink]) -> None:
    """Raise LinkLost if a worker has gone. Cheap."""
    for link in links:
        reason = link.lost()  # which names the rank
        if reason is not None:
            raise LinkLost(reason, rank=link.rank)


def _progress_of(link: HeadLink, on_progress: OnProgress | None) -> Callable[[Progress], None] | None:
    if on_progress is None:
        return None
    return lambda progress: on_progress(Rank(link.rank), progress)
