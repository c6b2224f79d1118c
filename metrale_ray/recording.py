# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Recording`: what an engine does, as records of its journal; and its last commands, for when it ends badly.

Rules: without a journal nothing is made but the short list of last commands, which holds what is there anyway. The
engine's thread makes every call but `refused`, and hands on what a step has as it is: its records are made where the
journal has time. Nothing here changes what the engine does.

What it leaves out: what a record is and where it goes (`protocol.journal`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

from metrale_ray.clock import Clock
from metrale_ray.config import EngineConfig
from metrale_ray.errors import Desync, MetraleError
from metrale_ray.last_commands import Heard, LastCommands, started_record
from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.protocol.commands import CommandFrame, Hello, Slot
from metrale_ray.protocol.front.params_map import params_to_map
from metrale_ray.protocol.journal.journal import Journal, JournalState, NoJournal
from metrale_ray.protocol.journal.records import (
    Admitted,
    Ended,
    LiveNote,
    Outcome,
    Record,
    Refused,
    Sampled,
    Snapshot,
    Started,
    TokenNote,
)
from metrale_ray.protocol.verdict import Verdict
from metrale_ray.sampling.noted_logits import NotedLogits
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.scheduler.plan import PlanRow
from metrale_ray.scheduler.request import FinishReason, RequestId
from metrale_ray.scheduler.request import Sequence as LiveSequence

TOKEN_BYTES = 256
"""What one token and its logits take while they wait to be a record."""


class Recording:
    """Between an engine and its journal. Without a journal `is_on` is False, and only `heard` does something."""

    def __init__(
        self, journal: Journal | None = None, clock: Clock = time.monotonic, wall_clock: Clock = time.time
    ) -> None:
        self._journal: Journal = NoJournal() if journal is None else journal
        self._clock = clock
        self._wall_clock = wall_clock
        self._began_s = clock()
        self._started: Started | None = None
        self._last = LastCommands()
        self._admitted: dict[RequestId, Admitted] = {}
        self._owners: dict[Slot, RequestId] = {}  # who had a row in the slot last

    @property
    def is_on(self) -> bool:
        """Whether there is a journal, so that records are worth making."""
        return self._journal.is_on

    @property
    def journal_state(self) -> JournalState | None:
        """How the journal does; None where there is none. From any thread."""
        return self._journal.state()

    @property
    def started(self) -> Started | None:
        """What was noted at the start; None before it."""
        return self._started

    # What happens ---------------------------------------------------------------------------------------------------

    def start(
        self, config: EngineConfig, hellos: Sequence[Hello], num_blocks: int, epoch: int, eos_token_ids: Iterable[int]
    ) -> None:
        """The ranks have met."""
        self._began_s = self._clock()
        wall_time_s = self._wall_clock()
        self._started = started_record(config, hellos, num_blocks, epoch, eos_token_ids, wall_time_s)
        self._note(self._started)

    def admitted(
        self,
        request_ids: Sequence[RequestId],
        client: tuple[int, int],
        prompt_token_ids: tuple[int, ...],
        params: TokenParams,
        seed: int,
        priority: int,
        left_s: float | None,
    ) -> None:
        """The engine took a request of `client`, the front and its number, which has `left_s` seconds left."""
        if not self.is_on:
            return
        record = Admitted(
            at_us=self._now_us(),
            request_ids=tuple(request_ids),
            front=client[0],
            number=client[1],
            prompt_token_ids=prompt_token_ids,
            num_prompt_tokens=len(prompt_token_ids),
            params=params_to_map(params),
            seed=seed,
            priority=priority,
            deadline_s=left_s,
        )
        self._admitted.update(dict.fromkeys(request_ids, record))
        self._note(record)

    def refused(self, client: tuple[int, int], code: str, message: str) -> None:
        """A request was not taken. From any thread."""
        if self.is_on:
            self._note(Refused(self._now_us(), *client, code, message))

    def sent(self, frame: CommandFrame, rows: Sequence[PlanRow]) -> Heard:
        """A command has left. What is heard of it goes into what is given back, and then into `heard`."""
        heard = Heard(frame, rows, self._now_us())
        self._last.add(heard)
        if self.is_on:
            for row in rows:
                if row.span.start == 0:
                    self._owners[row.span.slot] = row.request_id
            self._journal.note_later(heard.commanded, heard.num_bytes)
        return heard

    def heard(self, heard: Heard, verdict: Verdict) -> None:
        """All have answered, and this is what it means."""
        heard.ended(verdict.kind.value, verdict.rank, verdict.message, self._now_us())
        self._note_answered(heard)

    def broke(self, heard: Heard, error: MetraleError) -> None:
        """The command ended the engine."""
        outcome: Outcome = "desync" if isinstance(error, Desync) else "lost"
        heard.ended(outcome, getattr(error, "rank", None), error.message, self._now_us())
        self._note_answered(heard)

    def sampled(self, seq: int, token_ids: Mapping[RequestId, int], logits: NotedLogits) -> None:
        """The tokens that came of command `seq`, with raw logits of each. Nobody changes `token_ids` from now on."""
        make = partial(_sampled, self._now_us(), seq, token_ids, logits)
        self._journal.note_later(make, TOKEN_BYTES * len(token_ids))

    def ended(self, request_id: RequestId, reason: FinishReason, code: str = "", message: str = "") -> None:
        """A sequence is over."""
        if self.is_on:
            self._admitted.pop(request_id, None)
            self._note(Ended(self._now_us(), request_id, reason, code, message))

    def wants_snapshot(self) -> bool:
        """Whether the next call, between two commands, is to be `snapshot`."""
        return self._started is not None and self._journal.wants_snapshot()

    def snapshot(
        self,
        seq: int,
        settled_ok: bool,
        held: Mapping[Slot, SequenceState],
        live: Collection[LiveSequence],
    ) -> None:
        """All that lives now. `held` are the slots as a rank has them, `live` the sequences that have not ended."""
        assert self._started is not None, "a snapshot is asked for after the start"
        by_slot = {sequence.slot: sequence for sequence in live if sequence.slot is not None}
        notes = [self._live_note(state, by_slot.get(slot)) for slot, state in held.items()]
        notes += [_waiting_note(sequence) for sequence in live if sequence.slot not in held]
        admitted = tuple({id(record): record for record in self._admitted.values()}.values())
        self._note(Snapshot(self._now_us(), seq, settled_ok, self._started, admitted, tuple(notes)))

    def close(self, reason: str, failure: str | None) -> None:
        """The engine has ended."""
        self._journal.close(reason, failure)

    def last_records(self, error: BaseException) -> list[Record]:
        """The last commands and all that was heard of them, whether there is a journal or not; `error` ended rank 0."""
        return self._last.records(self._started, self._now_us(), 0, error)

    # ----------------------------------------------------------------------------------------------------------------

    def _note(self, record: Record) -> None:
        self._journal.note(record)

    def _note_answered(self, heard: Heard) -> None:
        if self.is_on:
            self._journal.note_later(heard.answered, heard.num_answer_bytes)

    def _now_us(self) -> int:
        return int((self._clock() - self._began_s) * 1e6)

    def _live_note(self, state: SequenceState, sequence: LiveSequence | None) -> LiveNote:
        if sequence is None:  # it has ended, and the ranks are told next
            owner = self._owners.get(state.slot, RequestId(0))
            return LiveNote(owner, state.slot, state.length, tuple(state.block_table), (), 0)
        return LiveNote(
            sequence.request_id,
            state.slot,
            state.length,
            tuple(state.block_table),
            tuple(sequence.tokens),
            sequence.num_prompt,
        )


def _sampled(at_us: int, seq: int, token_ids: Mapping[RequestId, int], logits: NotedLogits) -> Sampled:
    return Sampled(
        at_us, seq, tuple(map(TokenNote._make, zip(token_ids, token_ids.values(), logits.values(), strict=True)))
    )


def _waiting_note(sequence: LiveSequence) -> LiveNote:
    return LiveNote(sequence.request_id, None, 0, (), tuple(sequence.tokens), sequence.num_prompt)
