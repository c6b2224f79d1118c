# SPDX-License-Identifier: MIT OR Apache-2.0
"""`RecordedRequests`: the requests of a journal while they live, and what a step's logits give them.

Rules: they are made as the engine makes them, from what it noted when it took them, so that the same logits give the
same tokens. A token is noted when the next command comes, as only then it is known that its request goes on.

What is left out: limits of time. A grammar that was slow here is not given up, as that says nothing of the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from metrale_ray.errors import FrameError, JournalError, RequestError
from metrale_ray.grammar.constraint import Constraint
from metrale_ray.grammar.grammars import Grammars
from metrale_ray.live import LiveRequest
from metrale_ray.protocol.commands import Span
from metrale_ray.protocol.fields import Fields
from metrale_ray.protocol.front.params_map import read_params
from metrale_ray.protocol.journal.records import Admitted, LiveNote, RowNote, TokenNote
from metrale_ray.readout import Readout, read_out
from metrale_ray.replay.parting import Tensor
from metrale_ray.replay.ranks import ReplayRanks
from metrale_ray.sampling.history import DistinctTokens
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.scheduler.plan import PlanRow
from metrale_ray.scheduler.request import RequestId
from metrale_ray.vocabulary import within

Compile = Callable[[str], Constraint]


class RecordedRequests:
    """Those that live, by their ids. `compile_grammar` makes what a grammar's text means, or raises RequestError."""

    def __init__(self, eos_token_ids: Iterable[int], vocab_size: int, compile_grammar: Compile) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._compile = compile_grammar
        self._live: dict[RequestId, LiveRequest] = {}
        self._new_tokens: dict[RequestId, int] = {}

    def admit(self, record: Admitted) -> None:
        """The engine took these. Raises JournalError when they make no sense here."""
        prompt, params = record.prompt_token_ids, self._params(record)
        assert prompt is not None, "a redacted journal is not replayed"
        eos = within(self._eos_token_ids.union(params.end_token_ids), self._vocab_size)
        ends = frozenset(params.stop_token_ids) | eos
        constraint = self._constraint(record, params)
        distinct = DistinctTokens(prompt)
        for index, request_id in enumerate(map(RequestId, record.request_ids)):
            own = None if constraint is None else constraint.copy(eos, goes_on=params.ignore_eos)
            self._live[request_id] = LiveRequest(prompt, params, record.seed, index, ends, distinct, own)

    def resume(self, admitted: Iterable[Admitted], live: Iterable[LiveNote]) -> None:
        """Forget all and take those of a snapshot, each with the tokens that it has got so far."""
        self._live, self._new_tokens = {}, {}
        for record in admitted:
            self.admit(record)
        notes = {RequestId(note.request_id): note for note in live}
        self._live = {request_id: request for request_id, request in self._live.items() if request_id in notes}
        for request_id, request in self._live.items():
            note = notes[request_id]
            request.sample_row(note.num_prompt_tokens)  # makes its history, if it needs one
            for token_id in note.tokens[note.num_prompt_tokens :]:
                request.note(token_id)

    def end(self, request_id: int) -> None:
        """It has ended, for whatever reason."""
        self._live.pop(RequestId(request_id), None)
        self._new_tokens.pop(RequestId(request_id), None)

    def read_out(self, logits_RV: Tensor | None, notes: Sequence[RowNote], spans: Sequence[Span]) -> Readout:
        """What the step of these rows gives them."""
        for request in self._live.values():
            if request.constraint is not None:
                request.constraint.num_slow = 0
        readout = read_out(logits_RV, plan_rows(notes, spans), self._live)
        self._new_tokens = {request_id: sampled.token_id for request_id, sampled in readout.sampled.items()}
        return readout

    def keep(self, tokens: Iterable[TokenNote]) -> None:
        """These tokens were recorded for the step that was read out last, and are those that its requests keep."""
        for note in tokens:
            request_id = RequestId(note.request_id)
            if request_id in self._new_tokens and note.token_id is not None:
                self._new_tokens[request_id] = note.token_id

    def go_on(self) -> None:
        """The next command comes: whoever still lives keeps its token."""
        for request_id, token_id in self._new_tokens.items():
            self._live[request_id].note(token_id)
        self._new_tokens = {}

    def _params(self, record: Admitted) -> TokenParams:
        try:
            return read_params(Fields(record.params))
        except FrameError as error:
            raise JournalError(
                f"the parameters of request {record.request_ids[0]} cannot be read: {error.message}; the journal is of "
                "another build"
            ) from error

    def _constraint(self, record: Admitted, params: TokenParams) -> Constraint | None:
        if params.grammar is None:
            return None
        try:
            return self._compile(params.grammar)
        except RequestError as error:
            raise JournalError(
                f"the grammar of request {record.request_ids[0]} cannot be compiled here: {error.message}"
            ) from error


def requests_of(eos_token_ids: Iterable[int], ranks: ReplayRanks) -> RecordedRequests:
    """None yet, for the model of `ranks`. Its tokenizer is read when the first grammar comes."""
    ends = within(ranks.checkpoint.eos_token_ids, ranks.vocab_size)
    grammars = Grammars(ranks.checkpoint.path, ranks.vocab_size, ends)
    return RecordedRequests(eos_token_ids, ranks.vocab_size, grammars.compile)


def plan_rows(notes: Sequence[RowNote], spans: Sequence[Span]) -> list[PlanRow]:
    """The rows of a command as the engine had them."""
    return [PlanRow(RequestId(note.request_id), span, note.samples) for note, span in zip(notes, spans, strict=True)]
