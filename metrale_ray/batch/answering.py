# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Answering`: one request of a batch, asked as a service would ask it, and answered as a service would answer.

Rules. Whatever is wrong with a request is an answer, with the status and the body that a client would get over HTTP.
What is not about the request is none: while the engine has no room it is asked again, a little later each time, and an
engine that has ended ends the batch.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from metrale_ray.batch.line import CHAT_URL, BatchRequest
from metrale_ray.errors import EngineDead
from metrale_ray.serve.backend import ServedModel, model_named
from metrale_ray.serve.failures import ApiError, bad_request
from metrale_ray.serve.openai.call import ApiSettings, Call, Meter
from metrale_ray.serve.openai.chat import start_chat
from metrale_ray.serve.openai.chat_request import parse_chat
from metrale_ray.serve.openai.completion_request import parse_completion
from metrale_ray.serve.openai.completions import start_completion

log = logging.getLogger(__name__)

OK = 200
NO_ROOM = (429, 503)
GONE = ("engine_dead", "engine_unavailable")
FIRST_WAIT_S, MAX_WAIT_S = 0.05, 2.0
"""Room comes with the end of other requests, which takes a few steps at least."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client would get over HTTP. `body`: OpenAI's object, an error's too."""

    status: int
    request_id: str
    body: dict[str, Any]


class Answering:
    """Asks one model. `meter` is told of all requests. `sleep` takes seconds."""

    def __init__(
        self,
        model: ServedModel,
        settings: ApiSettings,
        meter: Meter,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._model = model
        self._settings = settings
        self._meter = meter
        self._sleep = sleep

    async def answer(self, request: BatchRequest) -> Reply:
        """The answer. Raises EngineDead: for an engine that has ended, and for one that has no room for too long."""
        request_id = uuid.uuid4().hex
        wait_s, waited_s = FIRST_WAIT_S, 0.0
        while True:
            try:
                return Reply(OK, request_id, await self._in_time(request, request_id))
            except ApiError as error:
                if error.code in GONE:
                    raise EngineDead(error.message) from error
                if error.status not in NO_ROOM:
                    return Reply(error.status, request_id, error.body())
                if waited_s >= self._most_s:
                    raise EngineDead(f"the engine has had no room for {waited_s:.0f} s: {error.message}") from error
                log.debug("line %d waits for room: %s", request.number, error.message)
            await self._sleep(wait_s)
            wait_s, waited_s = min(2 * wait_s, MAX_WAIT_S), waited_s + wait_s

    @property
    def _most_s(self) -> float:
        return self._settings.limits.max_request_s

    async def _in_time(self, request: BatchRequest, request_id: str) -> dict[str, Any]:
        """The answer, or why there is none, as an ApiError."""
        limit = asyncio.timeout(self._most_s)
        try:
            async with limit:
                return await self._whole(request, request_id)
        except ApiError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                message = f"the request took longer than the {self._most_s:g} s it may take (max_request_s)"
                raise ApiError(504, message, code="deadline_exceeded") from None
            log.exception("line %d failed by a mistake of ours", request.number)
            message = f"a mistake was made here ({type(error).__name__}); the log has it under line {request.number}"
            raise ApiError(500, message, code="internal_error") from error

    async def _whole(self, request: BatchRequest, request_id: str) -> dict[str, Any]:
        body = request.body
        if body.get("stream") is True:
            raise bad_request("stream is true, and an answer of a batch is one line; leave it out", param="stream")
        if request.url == CHAT_URL:
            chat = parse_chat(body, self._settings)
            started_chat = await start_chat(self._call(chat.model, request_id), chat)
            return await started_chat.whole()
        completion = parse_completion(body, self._settings)
        started = await start_completion(self._call(completion.model, request_id), completion)
        return await started.whole()

    def _call(self, name: str | None, request_id: str) -> Call:
        model = model_named([self._model], name)
        return Call(model, name or model.names[0], self._settings, request_id, self._meter)
