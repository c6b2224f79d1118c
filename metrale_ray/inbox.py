# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Inbox`: what the fronts said and the engine has not heard yet. From the head's loop to the engine's thread.

Rules: requests are taken in the order in which they came, a few between two steps. What ends something (Abort, Finish,
a front that went) does not wait behind other requests, and never comes before the request that it is about: a request
that is still here ends here, without the engine. A request whose grammar is being compiled is passed by until it is
ready. The requests in it and their prompts are bounded.

It leaves out what a request means, and whether the engine has room for it.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from metrale_ray.clock import NewCondition
from metrale_ray.errors import RequestError, SessionError
from metrale_ray.grammar.constraint import Constraint
from metrale_ray.protocol.front import Abort, Finish, FrontId, Submit
from metrale_ray.scheduler.admission import check_waiting_tokens
from metrale_ray.scheduler.limits import MAX_WAITING_PROMPT_TOKENS


@dataclass(slots=True)
class Arrived:
    """A request, and when the loop got it (monotonic clock). `finished`: sequences whose end was said before.

    `constraint`: what its grammar was compiled to, if it has one.
    """

    front: FrontId
    submit: Submit
    at_s: float
    finished: set[int] = field(default_factory=set)
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """A front ends a request or a sequence of it. `arrived`: the request, if the engine never heard of it."""

    front: FrontId
    said: Abort | Finish
    arrived: Arrived | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """A front has gone, and what it asked for with it."""

    front: FrontId


class Inbox:
    """For one thread that takes and any that put. `max_requests`: sequences' requests that may wait here."""

    def __init__(
        self,
        max_requests: int,
        max_prompt_tokens: int = MAX_WAITING_PROMPT_TOKENS,
        condition: NewCondition = threading.Condition,
    ) -> None:
        self._max_requests = max_requests
        self._max_prompt_tokens = max_prompt_tokens
        self._changed = condition()
        self._requests: dict[tuple[FrontId, int], Arrived] = {}  # in the order in which they came, or were ready
        self._preparing: dict[tuple[FrontId, int], Arrived] = {}
        self._num_prompt_tokens = 0
        self._num_sequences = 0
        self._num_dropped = 0
        self._endings: deque[Ending | Gone] = deque()
        self._is_woken = False

    def __len__(self) -> int:
        """Requests that wait here."""
        return len(self._requests) + len(self._preparing)

    @property
    def num_sequences(self) -> int:
        """Sequences of the requests that wait here. From any thread."""
        return self._num_sequences

    @property
    def num_dropped(self) -> int:
        """Sequences whose front went while they waited here. From any thread."""
        return self._num_dropped

    def submit(self, front: FrontId, submit: Submit, now_s: float) -> Arrived:
        """Put a request; one with a grammar waits for `ready` or `withdraw`.

        Raises RequestError when there are too many, SessionError for a number that waits here.
        """
        key, num_tokens = (front, submit.request_id), len(submit.prompt_token_ids)
        with self._changed:
            if self._find(key) is not None:
                raise SessionError(number_in_use(submit.request_id))
            self._check_room(num_tokens)
            arrived = Arrived(front, submit, now_s)
            (self._requests if submit.params.grammar is None else self._preparing)[key] = arrived
            self._num_prompt_tokens += num_tokens
            self._num_sequences += submit.params.n
            self._changed.notify_all()
            return arrived

    def is_preparing(self, arrived: Arrived) -> bool:
        """Whether this request is still here, and not ready."""
        return self._preparing.get(_key(arrived)) is arrived

    def ready(self, arrived: Arrived, constraint: Constraint) -> None:
        """The grammar of this request has been compiled; what has ended meanwhile is passed over."""
        with self._changed:
            if self.is_preparing(arrived):
                arrived.constraint = constraint
                self._requests[_key(arrived)] = self._preparing.pop(_key(arrived))
                self._changed.notify_all()

    def withdraw(self, arrived: Arrived) -> bool:
        """Take out a request whose grammar cannot be compiled. False when it has ended meanwhile."""
        with self._changed:
            if not self.is_preparing(arrived):
                return False
            self._remove(_key(arrived))
            return True

    def end(self, front: FrontId, said: Abort | Finish) -> None:
        """Put what ends a request or one sequence. The engine hears nothing of a request that is still here."""
        key = (front, said.request_id)
        with self._changed:
            arrived = self._find(key)
            if isinstance(said, Abort):
                if arrived is not None:
                    self._remove(key)
                self._endings.append(Ending(front, said, arrived))
            elif arrived is None:
                self._endings.append(Ending(front, said))
            elif said.index < arrived.submit.params.n:
                arrived.finished.add(said.index)
            self._changed.notify_all()

    def gone(self, front: FrontId) -> None:
        """The front has gone: what it asked for and the engine has not heard is let go at once."""
        with self._changed:
            for key in [key for key in (*self._requests, *self._preparing) if key[0] == front]:
                self._num_dropped += self._remove(key).submit.params.n
            self._endings.append(Gone(front))
            self._changed.notify_all()

    def wake(self) -> None:
        """End the wait of the taking thread, now or when it comes to wait."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Wait until something is here, or for `wake`, or until the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_woken or self._endings or self._requests, timeout_s)
            self._is_woken = False

    def take_ending(self) -> Ending | Gone | None:
        """The next thing to end, or None."""
        with self._changed:
            return self._endings.popleft() if self._endings else None

    def take_request(self) -> Arrived | None:
        """The next request, or None."""
        with self._changed:
            key = next(iter(self._requests), None)
            return None if key is None else self._remove(key)

    def _find(self, key: tuple[FrontId, int]) -> Arrived | None:
        return self._requests.get(key) or self._preparing.get(key)

    def _remove(self, key: tuple[FrontId, int]) -> Arrived:
        arrived = (self._requests if key in self._requests else self._preparing).pop(key)
        self._num_prompt_tokens -= len(arrived.submit.prompt_token_ids)
        self._num_sequences -= arrived.submit.params.n
        return arrived

    def _check_room(self, num_tokens: int) -> None:
        num_requests = len(self)
        if num_requests >= self._max_requests:
            raise RequestError(
                f"{num_requests} requests wait for the engine to hear of them, and {self._max_requests} may; try again "
                "later, or raise max_queue_len",
                code="queue_full",
            )
        check_waiting_tokens(self._num_prompt_tokens, num_tokens, self._max_prompt_tokens)


def _key(arrived: Arrived) -> tuple[FrontId, int]:
    return arrived.front, arrived.submit.request_id


def number_in_use(number: int) -> str:
    """What is said to a front that uses a number twice."""
    return f"it sent request {number} again, which has not ended; each request has a number of its own"
