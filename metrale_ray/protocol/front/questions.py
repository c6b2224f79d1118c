# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Questions`: what a front has asked the head and was not told yet, for any number of threads and event loops.

Rules: each question has a number, which grows. What the head tells answers the question of its number and all before
it. Each is answered, fails with the session, or is let go by whoever asked; none stays.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from typing import Any

from metrale_ray.errors import EngineDead, SessionError

Answer = Future[str]


class Questions:
    """The open questions of one session."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._open: dict[int, Answer] = {}

    def __len__(self) -> int:
        """Questions that wait for their answer."""
        return len(self._open)

    def add(self) -> tuple[int, Answer]:
        """The number of a new question, and where its answer comes, as text."""
        with self._lock:
            self._last += 1
            answer = self._open[self._last] = Answer()
            return self._last, answer

    def drop(self, number: int) -> None:
        """Nobody waits for this one any more. One that was answered is no error."""
        with self._lock:
            self._open.pop(number, None)

    def told(self, number: int, document: str) -> None:
        """The head has answered question `number`, and so all before it."""
        with self._lock:
            answers = [self._open.pop(each) for each in [each for each in self._open if each <= number]]
        for answer in answers:
            if answer.set_running_or_notify_cancel():
                answer.set_result(document)

    def die(self, death: EngineDead) -> None:
        """The session has ended: no answer comes any more."""
        with self._lock:
            answers, self._open = list(self._open.values()), {}
        for answer in answers:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(EngineDead(death.message, rank=death.rank))


def read_document(text: str) -> dict[str, Any]:
    """The JSON object that the head told. Raises SessionError for what is none."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SessionError(f"the head told figures that are no JSON: {error}") from error
    if not isinstance(document, dict):
        raise SessionError(f"the head told figures that are no JSON object but {type(document).__name__}")
    return document
