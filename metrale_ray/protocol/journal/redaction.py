# SPDX-License-Identifier: MIT OR Apache-2.0
"""Records without what clients sent and got: for journals that leave the machine or are kept for long.

Rules: prompts, tokens, frames, parameters, logits, and every text that may quote them are left out. What remains are
numbers: whose request, which slot, how many tokens, when, how it ended. Digests and witnesses are computed from tokens
and could be guessed, so each is replaced by one keyed with a secret that is made here, held in memory only, and never
written: equal ones stay equal within one journal, and nothing can be tried out against them. What each step has is
made anew field by field, because `dataclasses.replace` costs as much as all the rest.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from metrale_ray.protocol.journal.records import (
    Admitted,
    Answered,
    Closed,
    Commanded,
    Ended,
    ErrorNote,
    LiveNote,
    RankAnswer,
    Record,
    Refused,
    Sampled,
    Snapshot,
    Started,
    TokenNote,
)
from metrale_ray.protocol.limits import DIGEST_BYTES

LEFT_OUT = "(left out)"
"""Stands for a text that was there."""

SECRET_BYTES = 32


class Redaction:
    """Redacts the records of one journal, with a secret of its own."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._rules: dict[type[Any], Callable[[Any], Record]] = {
            Started: _started,
            Snapshot: _snapshot,
            Admitted: _admitted,
            Refused: _refused,
            Commanded: _commanded,
            Answered: self._answered,
            Sampled: _sampled,
            Ended: _ended,
            Closed: _closed,
        }

    def redact(self, record: Record) -> Record:
        """`record` without clients' content."""
        rule = self._rules.get(type(record))
        return record if rule is None else rule(record)

    def _answered(self, record: Answered) -> Answered:
        known: dict[bytes, bytes] = {}  # ranks in step answer alike
        answers = tuple(self._answer(answer, known) for answer in record.answers)
        message = _left_out(record.message)
        return Answered(record.at_us, record.seq, record.kind, record.rank, message, answers)

    def _answer(self, answer: RankAnswer, known: dict[bytes, bytes]) -> RankAnswer:
        error = answer.error and ErrorNote(answer.error.code, _left_out(answer.error.message), answer.error.slots)
        return RankAnswer(
            rank=answer.rank,
            status=answer.status,
            digest=self._keyed(answer.digest, known),
            witness={name: self._keyed(value, known) for name, value in answer.witness.items()},
            computed_us=answer.computed_us,
            waited_us=answer.waited_us,
            lag_us=answer.lag_us,
            error=error,
        )

    def _keyed(self, digest: bytes, known: dict[bytes, bytes]) -> bytes:
        keyed = known.get(digest)
        if keyed is None:
            keyed = known[digest] = blake2b(digest, digest_size=DIGEST_BYTES, key=self._secret).digest()
        return keyed


def _left_out(text: str) -> str:
    return LEFT_OUT if text else ""


def _started(record: Started) -> Started:
    return dataclasses.replace(record, redacted=True)


def _snapshot(record: Snapshot) -> Snapshot:
    admitted, live = tuple(map(_admitted, record.admitted)), tuple(map(_live, record.live))
    return dataclasses.replace(record, started=_started(record.started), admitted=admitted, live=live)


def _live(live: LiveNote) -> LiveNote:
    return dataclasses.replace(live, tokens=())


def _admitted(record: Admitted) -> Admitted:
    return dataclasses.replace(record, prompt_token_ids=None, params={})


def _refused(record: Refused) -> Refused:
    return dataclasses.replace(record, message=_left_out(record.message))


def _commanded(record: Commanded) -> Commanded:
    return Commanded(record.at_us, record.epoch, record.seq, record.cmd, record.rows, None)


def _sampled(record: Sampled) -> Sampled:
    tokens = tuple([TokenNote._make((token.request_id, None, ())) for token in record.tokens])
    return Sampled(record.at_us, record.seq, tokens)


def _ended(record: Ended) -> Ended:
    return dataclasses.replace(record, message=_left_out(record.message))


def _closed(record: Closed) -> Closed:
    return dataclasses.replace(record, failure=record.failure and LEFT_OUT)
