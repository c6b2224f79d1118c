# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a replay found, held against what the journal has: the first difference, in words.

Rules: what follows from the commands alone (digests, and the witnesses of PORTABLE) must be equal whatever computes.
Tokens must be equal too. The last bits of results (other witnesses, the logits noted with each token) are compared
where the same kernels computed them over the same rows; elsewhere the largest difference of the logits is only kept.

What is left out: which commands (`player`), and what users are shown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from metrale_ray.protocol.commands import Logits, Reply, Span, Status, command_rows
from metrale_ray.protocol.journal.records import RankAnswer, TokenNote, probes
from metrale_ray.readout import Readout
from metrale_ray.replay.names import FIELD_NAMES
from metrale_ray.replay.parting import Tensor, largest_gap
from metrale_ray.replay.player import Played
from metrale_ray.scheduler.request import RequestId

PORTABLE = ("command", "tokens", "blocks", "lengths", "digest")
"""Witnesses, and the digest, that follow from the commands, whatever the ranks compute with, however many they are."""


MAX_ROUNDING = 0.25
"""Of the largest logit noted: bfloat16 moves one by a few percent, and by more where it chooses another expert."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first one. `rank` or `request_id` is None where it is of no single one. `cmd` is the command's code."""

    seq: int
    cmd: int
    field: str
    rank: int | None
    request_id: int | None
    recorded: str
    found: str

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        where += "" if self.request_id is None else f"request {self.request_id}: "
        return f"{where}{FIELD_NAMES.get(self.field, self.field)}: recorded {self.recorded}, found {self.found}"


class Comparison:
    """Of one replay. `has_same_kernels`: the last bits must be equal too. `num_values` logits were looked at so far.

    Where they need not be, another token is no difference as long as its logit is as near to the recorded token's as
    sums that round otherwise can bring it: `num_near_ties`.

    `given_up`: requests that may lack a token in the journal which they get here.
    """

    def __init__(self, vocab_size: int, given_up: Collection[int] = (), *, has_same_kernels: bool) -> None:
        self.has_same_kernels = has_same_kernels
        self.num_values = self.num_exact_values = 0
        self.largest_gap = 0.0
        self.num_near_ties = 0
        self._probes = probes(vocab_size)
        self._given_up = given_up

    def of_answers(self, played: Played) -> Difference | None:
        """What the ranks answered, before any token is looked at."""
        return next(self._answer_differences(played), None)

    def of_tokens(
        self, played: Played, readout: Readout, logits_RV: Tensor | None, recorded: Sequence[TokenNote]
    ) -> Difference | None:
        """The token of each row that samples, or that it has none; and the logits that were noted with it."""
        notes = {RequestId(note.request_id): note for note in recorded}
        for index, row in _sampling_rows(played):
            note = notes.pop(row, None)
            found = readout.sampled.get(row)
            recorded_token = None if note is None else note.token_id
            found_token = None if found is None else found.token_id
            is_other = recorded_token != found_token and not (note is None and row in self._given_up)
            if is_other and not self._is_near_tie(played, note, found_token, logits_RV, index):
                error = readout.errors.get(row)
                said = _token_text(found_token) if error is None else f"an error, {error.message}"
                return _difference(played, "the token", _token_text(recorded_token), said, request_id=row)
            if note is not None and note.values and logits_RV is not None:
                difference = self._of_values(played, note, logits_RV[index])
                if difference is not None:
                    return difference
        for request_id, note in notes.items():
            return _difference(played, "the token", _token_text(note.token_id), "no such row", request_id=request_id)
        return None

    def _is_near_tie(
        self, played: Played, note: TokenNote | None, found: int | None, logits_RV: Tensor | None, index: int
    ) -> bool:
        """Whether rounding explains that the token `found` was chosen here. It moves a logit by as much as the noted
        ones show, so it brings two together that are twice as far apart."""
        if self._is_exact(played) or note is None or note.token_id is None or found is None or logits_RV is None:
            return False
        logits_V = logits_RV[index]
        here = tuple(float(logits_V[token_id]) for token_id in (note.token_id, *self._probes))
        rounding = max(self.largest_gap, largest_gap(note.values, here)) if note.values else self.largest_gap
        if rounding > MAX_ROUNDING * max(map(abs, here)):
            return False  # what differs so much was not rounded
        is_near = abs(float(logits_V[found]) - here[0]) <= 2 * rounding
        self.num_near_ties += is_near
        return is_near

    def _of_values(self, played: Played, note: TokenNote, logits_V: Tensor) -> Difference | None:
        assert note.token_id is not None
        found = tuple(float(logits_V[token_id]) for token_id in (note.token_id, *self._probes))
        gap = largest_gap(note.values, found)
        self.num_values += len(found)
        self.largest_gap = max(self.largest_gap, gap)
        if not self._is_exact(played):
            return None
        self.num_exact_values += len(found)
        if gap == 0.0:
            return None
        shown = (", ".join(f"{value:.9g}" for value in values) for values in (note.values, found))
        return _difference(played, "the logits noted with the token", *shown, request_id=note.request_id)

    def _answer_differences(self, played: Played) -> Iterator[Difference]:
        answered, replies = played.answered, played.replies
        if answered is None:
            return
        if answered.kind == "ok":
            yield from _failures(played, replies)
        # The cause before its effects, on whatever rank: what one rank has wrong reaches the others through the sums.
        for name in FIELD_NAMES:
            for answer in answered.answers if name in PORTABLE or self._is_exact(played) else ():
                reply = replies[answer.rank] if answer.rank < len(replies) else replies[0]
                recorded, found = _shown(name, answer), _shown(name, reply)
                if recorded is not None and found is not None and recorded != found:
                    yield _difference(played, name, recorded.hex(), found.hex(), rank=answer.rank)

    def _is_exact(self, played: Played) -> bool:
        return self.has_same_kernels and not played.is_approximate


def _shown(name: str, answer: RankAnswer | Reply) -> bytes | None:
    """What an answer has of this name; None where that was not asked for."""
    return answer.digest if name == "digest" else answer.witness.get(name)


def _sampling_rows(played: Played) -> Iterator[tuple[int, RequestId]]:
    """The requests of the rows that sample, each with the place of its last logits among those of the step."""
    num_logits = 0
    for note, span in zip(played.commanded.rows, command_rows(played.frame.command), strict=True):
        num_logits += _num_logits(span)
        if note.samples:
            yield num_logits - 1, RequestId(note.request_id)


def _num_logits(span: Span) -> int:
    return len(span.token_ids) if span.logits is Logits.ALL else int(span.logits is Logits.LAST)


def _failures(played: Played, replies: Sequence[Reply]) -> Iterator[Difference]:
    for reply in replies:
        if reply.status is not Status.OK:
            reason = "no reason given" if reply.error is None else reply.error.message
            yield _difference(
                played, "the outcome", "ok", f"{reply.status.name.lower()}: {reason}", rank=int(reply.rank)
            )


def _difference(
    played: Played, name: str, recorded: str, found: str, *, rank: int | None = None, request_id: int | None = None
) -> Difference:
    commanded = played.commanded
    return Difference(commanded.seq, commanded.cmd, name, rank, request_id, recorded, found)


def _token_text(token_id: int | None) -> str:
    return "none" if token_id is None else str(token_id)
