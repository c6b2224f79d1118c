# SPDX-License-Identifier: MIT OR Apache-2.0
"""`EngineLink`: a front's way to an engine that may not be there yet, may go, and may come back.

Rules. One task (`run`) looks for the engine, opens a session, asks for a real token, and from then on asks the head how
it is, until the session ends; then it looks again, whatever went wrong. Everything else only reads what this task has
noted, and never waits. An engine that is not heard of for a few seconds is not ready, long before its session is given
up. What is shown of an engine that has gone says so: nothing runs in it any more.

What it leaves out: how an engine is found (`find`), and what is done with it (`serve.openai`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from metrale_ray.errors import EngineDead, MetraleError, RequestError
from metrale_ray.protocol.front import FrontClient
from metrale_ray.protocol.keys import KeyPair
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.serve.backend import Health
from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.front import Front
from metrale_ray.serve.text import Tokenizer

log = logging.getLogger(__name__)

ASK_S = 1.0
"""How often the head is asked how it is: often enough for a probe each second."""

SILENT_S = 5.0
"""An engine of which nothing was heard for so long is not ready. It beats every 2 s and answers each question."""

TOLD_S = 12.0
"""A head that is heard of and has not said how it is for so long is not ready either: two questions went unanswered."""

MAX_REFUSALS = 3
"""First tokens that an engine may refuse in a row. One that never gives one will not do it later."""

RETRY_S = 1.0
"""How long after a failed search the next one begins."""

OPEN_TIMEOUT_S = 30.0
"""The head is ready and on the same network: it opens a session at once."""

TOKEN_TIMEOUT_S = 600.0
"""For the first token. What a slow machine needs for one step is far less; readiness waits for it meanwhile."""

_FIRST_TOKEN = TokenParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where a head listens for a front with these keys, its own public key, and how many requests may wait there."""

    address: str
    keys: KeyPair
    head_key: str
    max_queue_len: int


Find = Callable[[], Awaitable[EngineAddress]]
Explain = Callable[[EngineDead], Awaitable[EngineDead]]


class EngineLink:
    """A `Backend`. All methods belong to the loop that runs `run`.

    `find` gives the address of the engine, waiting for it where it must; it may raise MetraleError, and is then asked
    again. `explain` may know more of a death than the session does.
    """

    def __init__(
        self,
        find: Find,
        tokenizer: Tokenizer | None,
        *,
        progress_timeout_s: float,
        explain: Explain | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find = find
        self._tokenizer = tokenizer
        self._progress_timeout_s = progress_timeout_s
        self._explain = explain
        self._clock = clock
        self._client: FrontClient | None = None
        self._front: Front | None = None  # once it has given a token
        self._why_not = "the engine is starting"
        self._told: dict[str, Any] = {}
        self._told_at_s = 0.0
        self._last_death = ""
        self.num_sessions = 0
        self._num_refusals = 0
        self._refusal = ""

    def front(self) -> Front:
        """The way to ask the engine something. Raises ApiError 503."""
        front, client = self._front, self._client
        if front is None or client is None or client.death is not None:
            raise ApiError(503, f"{self._reason()}; try again later", code="engine_unavailable")
        return front

    def health(self) -> Health:
        """How the engine is now."""
        moving = self._moving_reason()
        ready = self._ready_reason() or moving
        return Health(not ready, ready, not moving, moving)

    def lost_reason(self) -> str:
        """Why there is no session with a ready engine; "" while there is one, even if it is not heard of just now."""
        return "" if self._front is not None and self._reason_of_death() is None else self._reason()

    def figures(self) -> Mapping[str, Any]:
        """What the head told last."""
        return self._told

    @property
    def refusal(self) -> str:
        """Why the engine gives no token at all, once that is certain; "" otherwise."""
        return self._refusal if self._num_refusals >= MAX_REFUSALS else ""

    async def explain(self, seen: EngineDead) -> EngineDead:
        """The death as a caller is told it."""
        return seen if self._explain is None else await self._explain(seen)

    def die(self, death: EngineDead) -> None:
        """Whoever knows better says that the engine has ended: all who wait are told so. From any thread."""
        client = self._client
        if client is not None:
            client.die(death.message, death.rank)

    async def ask(self) -> Mapping[str, Any]:
        """The head's figures as they are now; those of the last time if it does not answer, or is not there."""
        client = self._client
        if client is not None:
            with contextlib.suppress(EngineDead):
                await self._ask(client)
        return self._told

    async def run(self) -> None:
        """Keep a session with the engine until cancelled."""
        while True:
            try:
                await self._hold_session(await self._find())
            except MetraleError as error:
                self._lose(error.message)
            except TimeoutError as error:
                self._lose(str(error))
            except Exception as error:
                log.exception("the way to the engine failed, and is tried again")
                self._lose(f"{type(error).__name__}: {error}")
            await asyncio.sleep(RETRY_S)

    async def _hold_session(self, where: EngineAddress) -> None:
        """One session, from its beginning to its end, which is raised. Raises EngineDead, TimeoutError, UserError."""
        client = FrontClient(where.address, where.keys, where.head_key)
        try:
            await asyncio.to_thread(client.wait_opened, OPEN_TIMEOUT_S)
            self._client = client
            self._why_not = "the engine has not given its first token yet"
            await self._ask(client)
            await self._wait_first_token(client)
            # Half of the head's queue: other fronts have room too.
            self._front = Front(client, self._tokenizer, max_waiting=max(1, where.max_queue_len // 2))
            self.num_sessions += 1
            log.info("the engine at %s is ready", where.address)
            while client.death is None:
                await asyncio.sleep(ASK_S)
                await self._ask(client)
            raise client.death
        finally:
            if self._front is not None and client.death is not None:
                self._last_death = client.death.message
                self._told = ended_figures(self._told, self._last_death)
            self._front = self._client = None
            await asyncio.to_thread(client.close)

    async def _ask(self, client: FrontClient) -> None:
        # A head that does not answer is heard of less and less; its session ends by itself.
        with contextlib.suppress(TimeoutError):
            told = await client.aask(SILENT_S)
            self._warn_of_journal(told)
            self._told, self._told_at_s = told, self._clock()

    def _warn_of_journal(self, told: Mapping[str, Any]) -> None:
        """Its own log is with the head, on whatever node that is; whoever serves is told once."""
        failure = (told.get("journal") or {}).get("failure")
        if failure is not None and failure != (self._told.get("journal") or {}).get("failure"):
            log.error("%s; the engine goes on without it", failure)

    async def _wait_first_token(self, client: FrontClient) -> None:
        """Let the engine give one token. Raises EngineDead, RequestError with its reason, TimeoutError."""
        handle = client.submit((0,), _FIRST_TOKEN)
        try:
            async with asyncio.timeout(TOKEN_TIMEOUT_S):
                output = await handle.aget()
        except BaseException:
            handle.abort()
            raise
        if output.error is None:
            self._num_refusals = 0
            return
        code, message = output.error
        self._refusal = f"the engine gave no first token: {message}"
        self._num_refusals += 1
        raise RequestError(self._refusal, code=code)

    def _lose(self, reason: str) -> None:
        if self._last_death and self._last_death not in reason:
            reason = f"{reason} (the last one ended: {self._last_death})"
        if reason != self._why_not:
            log.warning("there is no engine: %s", reason)
        self._why_not = reason

    def _reason(self) -> str:
        return self._reason_of_death() or self._why_not

    def _reason_of_death(self) -> str | None:
        death = self._client.death if self._client is not None else None
        return None if death is None else death.message

    def _ready_reason(self) -> str:
        client = self._client
        if self._front is None or client is None or client.death is not None:
            return self._reason()
        if client.heard_age_s > SILENT_S:
            return f"nothing was heard of the engine for {client.heard_age_s:.0f} s"
        told_age_s = self._clock() - self._told_at_s
        if told_age_s > TOLD_S:
            return f"the head has not said for {told_age_s:.0f} s how the engine is"
        return ""

    def _moving_reason(self) -> str:
        """ "" while no engine is there: that is readiness' business, and a probe of progress must not end its start."""
        if self._client is None or not self._told.get("has_work"):
            return ""
        age_s = float(self._told["progress_age_s"]) + self._clock() - self._told_at_s
        if age_s <= self._progress_timeout_s:
            return ""
        return f"work waits and no command has completed for {age_s:.0f} s"


def ended_figures(told: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """The last figures of an engine that has ended: sums stay, and nothing waits, runs or is held any more."""
    if not told:
        return {}
    cache = dict(told.get("cache") or {})
    if "total_blocks" in cache:
        cache["free_blocks"] = cache["total_blocks"]
    gone = {"phase": "ended", "why": reason, "running": 0, "waiting": 0, "has_work": False, "progress_age_s": 0.0}
    ranks = [{**rank, "state": "ended"} for rank in told.get("ranks") or ()]
    return {**told, **gone, "cache": cache, "ranks": ranks}
