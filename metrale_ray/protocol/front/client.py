# SPDX-License-Identifier: MIT OR Apache-2.0
"""`FrontClient`: a front's session with the head, for any number of threads and event loops.

Rules: whoever waits is always answered: with an output, with EngineDead when the head died, was lost or fell silent,
when somebody who knows says so (`die`), or when the front was closed. The first cause stays. A client is used for one
session; after its death a new one is made.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from metrale_ray.clock import Clock, NewCondition
from metrale_ray.errors import EngineDead, FrameError, RequestError, SessionError
from metrale_ray.protocol.front.connection import Connect, FrontConnection
from metrale_ray.protocol.front.frames import encode, encode_submit
from metrale_ray.protocol.front.handle import RequestHandle
from metrale_ray.protocol.front.messages import (
    BEAT_S,
    MAX_TIMEOUT_S,
    SILENCE_S,
    Abort,
    Ask,
    Beat,
    Dead,
    Finish,
    FromHead,
    Opened,
    Outputs,
    Submit,
    Told,
)
from metrale_ray.protocol.front.params_map import PackedParams
from metrale_ray.protocol.front.questions import Answer, Questions, read_document
from metrale_ray.protocol.keys import KeyPair
from metrale_ray.protocol.limits import I32_MAX, I32_MIN
from metrale_ray.sampling import checks
from metrale_ray.sampling.token_params import TokenParams

log = logging.getLogger(__name__)

MAX_LIVE_REQUESTS = 65_536
"""Requests of one front at a time: above what the head's queue takes, and it bounds everything that waits here."""


class FrontClient:
    """A session with the head at `address` (tcp://host:port), which begins at once; see `wait_opened`.

    `keys` are this front's own, whose public half the head must allow; `head_key` is the head's. Raises StartError for
    a key that is none.
    """

    def __init__(
        self,
        address: str,
        keys: KeyPair,
        head_key: str,
        *,
        beat_s: float = BEAT_S,
        silence_s: float = SILENCE_S,
        connect: Connect = FrontConnection,
        condition: NewCondition = threading.Condition,
        clock: Clock = time.monotonic,
    ) -> None:
        self._condition = condition
        self._clock = clock
        self._changed = condition()
        self._handles: dict[int, RequestHandle] = {}
        self._next_ids = itertools.count(1)
        self._num_frames = 0
        self._questions = Questions()
        self._opened: Opened | None = None
        self._death: EngineDead | None = None
        self._connection = connect(
            address, keys, head_key, self._take, self._lose_head, beat_s=beat_s, silence_s=silence_s
        )
        self._connection.start()

    def __enter__(self) -> FrontClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def death(self) -> EngineDead | None:
        """Why the session has ended, or None while it goes on."""
        return self._death

    @property
    def heard_age_s(self) -> float:
        """Seconds since anything was heard of the head, or since this was made. The head beats every BEAT_S."""
        return max(0.0, self._clock() - self._connection.heard_at_s)

    def wait_opened(self, timeout_s: float) -> Opened:
        """What the head says of the engine. Raises EngineDead when the session ends first, TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._opened is not None or self._death is not None, timeout_s):
                raise TimeoutError(f"the head did not open the session within {timeout_s:g} s")
            self._check_alive()
            assert self._opened is not None  # what was waited for
            return self._opened

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: TokenParams | PackedParams,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> RequestHandle:
        """Send one request of `n` sequences. Whoever sends many with the same `params` packs them once.

        `priority`: -2**31 to 2**31 - 1, lower goes first. `timeout_s`: from the request's arrival at the head; what has
        not ended by then ends with the error "deadline_exceeded". Raises RequestError, with `param` naming the field,
        for what cannot be sent, and EngineDead.
        """
        checks.integer("priority", priority, I32_MIN, I32_MAX)
        if timeout_s is not None:
            timeout_s = checks.number(
                "timeout_s", timeout_s, 0, MAX_TIMEOUT_S, "more, or none for no limit", above=True
            )
        with self._changed:
            self._check_alive()
            if len(self._handles) >= MAX_LIVE_REQUESTS:
                message = f"this front has {MAX_LIVE_REQUESTS} requests open; wait until some have ended"
                raise RequestError(message, code="too_many_requests")
            request_id = next(self._next_ids)
        given = params.params if isinstance(params, PackedParams) else params
        handle = RequestHandle(request_id, self._send, given.n, self._condition())
        packed = params if isinstance(params, PackedParams) else None
        data = _encode_submit(Submit(request_id, tuple(prompt_token_ids), given, priority, timeout_s), packed)
        with self._changed:
            self._check_alive()
            self._handles[request_id] = handle
        self._connection.send(data)
        return handle

    def ask(self, timeout_s: float) -> dict[str, Any]:
        """The head's figures (see `figures`), as they are when it answers. Raises EngineDead, TimeoutError."""
        number, answer = self._put_question()
        try:
            return read_document(answer.result(timeout_s))
        except TimeoutError:
            raise TimeoutError(_no_answer(timeout_s)) from None
        finally:
            self._questions.drop(number)

    async def aask(self, timeout_s: float) -> dict[str, Any]:
        """As `ask`, from an event loop."""
        number, answer = self._put_question()
        try:
            return read_document(await asyncio.wait_for(asyncio.wrap_future(answer), timeout_s))
        except TimeoutError:
            raise TimeoutError(_no_answer(timeout_s)) from None
        finally:
            self._questions.drop(number)

    def die(self, reason: str, rank: int | None = None) -> None:
        """End the session: every waiting and later call raises EngineDead. Only the first reason counts."""
        with self._changed:
            if self._death is not None:
                return
            self._death = EngineDead(reason, rank=rank)
            handles, self._handles = list(self._handles.values()), {}
            self._changed.notify_all()
        for handle in handles:
            handle.die(self._death)
        self._questions.die(self._death)
        self._connection.stop()

    def close(self) -> None:
        """Leave: the head aborts what is still running. Calling it twice is allowed."""
        self.die("this front was closed")
        self._connection.join()

    def _put_question(self) -> tuple[int, Answer]:
        with self._changed:
            self._check_alive()
            number, answer = self._questions.add()
        self._connection.send(encode(Ask(number)))
        return number, answer

    def _lose_head(self, reason: str) -> None:
        self.die(reason, 0)  # the head is rank 0

    def _send(self, message: Abort | Finish) -> None:
        self._connection.send(encode(message))

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDead(self._death.message, rank=self._death.rank)  # a new one: raising changes its traceback

    def _take(self, message: FromHead) -> None:
        match message:
            case Outputs():
                self._hand_out(message)
            case Opened():
                with self._changed:
                    self._opened = message
                    self._changed.notify_all()
            case Dead(reason, rank):
                self.die(reason, rank)
            case Told(number, document):
                self._questions.told(number, document)
            case Beat():
                pass

    def _hand_out(self, frame: Outputs) -> None:
        if frame.number != self._num_frames + 1:
            raise SessionError(f"outputs frame {frame.number} came after frame {self._num_frames}")
        self._num_frames = frame.number
        for output in frame.outputs:
            with self._changed:
                handle = self._handles.get(output.request_id)
                if handle is not None and handle.ends_with(output):
                    self._handles.pop(output.request_id, None)
            if handle is None:
                log.debug("an output for request %d came after its end", output.request_id)
            else:
                handle.put(output)
        self._connection.note_read(frame.number)


def _no_answer(timeout_s: float) -> str:
    return f"the head did not tell its figures within {timeout_s:g} s"


def _encode_submit(submit: Submit, params: PackedParams | None) -> bytes:
    try:
        return encode(submit) if params is None else encode_submit(submit, params)
    except FrameError as error:
        raise RequestError(error.message, param="prompt_token_ids") from error
