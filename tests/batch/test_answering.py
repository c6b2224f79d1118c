# SPDX-License-Identifier: MIT OR Apache-2.0
"""One request: what has no room is asked again, an engine that has gone ends the batch, all else is its answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from metrale_ray.batch.answering import MAX_WAIT_S, Answering, Reply
from metrale_ray.batch.line import BatchRequest, read_line
from metrale_ray.batch.tally import Tally
from metrale_ray.errors import EngineDead
from metrale_ray.serve.backend import GenerationDefaults, Health, ServedModel
from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.front import Front
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.openai.call import ApiSettings
from tests.batch.rig import chat, completion


class FailingBackend:
    """Whoever asks it gets the next of these failures."""

    def __init__(self, fail: Callable[[int], Exception]) -> None:
        self.num_asked = 0
        self._fail = fail

    def front(self) -> Front:
        self.num_asked += 1
        raise self._fail(self.num_asked)

    def health(self) -> Health:
        return Health(True, "", True, "")

    def figures(self) -> Mapping[str, Any]:
        return {}

    async def explain(self, seen: EngineDead) -> EngineDead:
        return EngineDead(f"{seen.message}, as is known")


def request(line: Mapping[str, Any]) -> BatchRequest:
    found = read_line(1, json.dumps(line).encode(), ServeLimits())
    assert isinstance(found, BatchRequest)
    return found


class Asked:
    """One request to a backend that fails so, with the waits between."""

    def __init__(self, fail: Callable[[int], Exception], line: Mapping[str, Any] | None = None, **limits: Any) -> None:
        self.waits: list[float] = []
        self.backend = FailingBackend(fail)
        model = ServedModel(("succ",), self.backend, None, None, GenerationDefaults(), max_model_len=100, created=1)
        settings = ApiSettings(ServeLimits(**limits))
        self._answering = Answering(model, settings, Tally(1), self._sleep)
        self._line = completion("a") if line is None else line

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    def reply(self) -> Reply:
        return asyncio.run(self._answering.answer(request(self._line)))


def no_room(number: int) -> ApiError:
    code, status = (("queue_full", 429), ("too_many_requests", 429), ("aborted", 503))[number % 3]
    return ApiError(status, "no room", code=code)


def test_what_has_no_room_is_asked_again_a_little_later_each_time_and_is_no_answer() -> None:
    asked = Asked(lambda number: no_room(number) if number < 10 else ApiError(400, "wrong", code="x"))
    assert asked.reply().status == 400
    assert asked.backend.num_asked == 10
    assert asked.waits == sorted(asked.waits)
    assert (len(asked.waits), asked.waits[0], asked.waits[-1]) == (9, 0.05, MAX_WAIT_S)


def test_an_engine_that_has_no_room_for_too_long_ends_the_batch() -> None:
    asked = Asked(no_room, max_request_s=20.0)
    with pytest.raises(EngineDead, match="the engine has had no room for 2"):
        asked.reply()
    assert 20 <= sum(asked.waits) <= 20 + MAX_WAIT_S


@pytest.mark.parametrize(
    "failure",
    [ApiError(503, "rank 1 has gone", code="engine_unavailable"), EngineDead("rank 1 has gone")],
)
def test_an_engine_that_has_gone_is_no_answer_either(failure: Exception) -> None:
    asked = Asked(lambda number: failure)
    with pytest.raises(EngineDead, match="rank 1 has gone"):
        asked.reply()
    assert asked.waits == []


@pytest.mark.parametrize(
    ("line", "status", "code", "message"),
    [
        (completion("a", stream=True), 400, "invalid_request", "stream is true"),
        (completion("a", stream="yes"), 400, "invalid_request", "stream is"),
        (completion("a", model="gpt-4"), 404, "model_not_found", "there is no model 'gpt-4' here; there are succ"),
        (completion("a", temperature=-1), 400, "invalid_request", "temperature is -1"),
        (completion("a", n=1000), 400, "limit_exceeded", "max_n"),
        (completion("a", suffix="x"), 400, "unsupported_field", "suffix"),
        (chat("a", messages=[]), 400, "invalid_request", "messages"),
        (chat("a", model=None), 500, "broken", "the engine broke"),
    ],
)
def test_what_is_wrong_with_a_request_is_its_answer(line: dict[str, Any], status: int, code: str, message: str) -> None:
    reply = Asked(lambda number: ApiError(500, "the engine broke", code="broken"), line).reply()
    assert (reply.status, reply.body["error"]["code"]) == (status, code)
    assert message in reply.body["error"]["message"]


def test_a_mistake_of_ours_is_an_answer_too_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    reply = Asked(lambda number: KeyError("x")).reply()
    assert (reply.status, reply.body["error"]["code"]) == (500, "internal_error")
    assert "KeyError" in caplog.text


def test_a_request_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*given: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("metrale_ray.batch.answering.start_completion", never)
    reply = Asked(no_room, max_request_s=0.01).reply()
    assert (reply.status, reply.body["error"]["code"]) == (504, "deadline_exceeded")
    assert "0.01 s" in reply.body["error"]["message"]


def test_a_timeout_within_is_no_end_of_its_time(caplog: pytest.LogCaptureFixture) -> None:
    reply = Asked(lambda number: TimeoutError()).reply()
    assert (reply.status, reply.body["error"]["code"]) == (500, "internal_error")
