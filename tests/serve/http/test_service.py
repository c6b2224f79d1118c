# SPDX-License-Identifier: MIT OR Apache-2.0
"""A live service: clients that leave, hostile bodies, and the end, each with normal requests beside or behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from metrale_ray.serve.http.settings import HttpSettings
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.openai.call import ApiSettings
from tests.service_rig import MODEL_NAME, ServiceRig, serving, write_model
from tests.test_head import until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = {"max_tokens": 3000, "temperature": 0, "ignore_eos": True}
ENDLESS = {"prompt": [5], **LONG}
JSON_TYPE = [("Content-Type", "application/json")]
NUM_SLOTS = 4
MAX_TURN_S = 0.3
LIMITS = ServeLimits(max_body_bytes=4 * 2**20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="module")
def rig(model: Path) -> Iterator[ServiceRig]:
    settings = HttpSettings(api=ApiSettings(limits=LIMITS), api_keys=("a-key-of-ours",))
    with serving(model, 2, settings=settings, max_queue_len=8, max_num_batched_tokens=64) as rig:
        yield rig


@contextmanager
def asking(rig: ServiceRig, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A connection on which the request has been sent; leaving closes it."""
    content = json.dumps({"model": MODEL_NAME, **body}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer {rig.api_key}\r\n"
    )
    host, port = rig.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield connection


@contextmanager
def streaming(rig: ServiceRig) -> Iterator[list[float]]:
    """A stream beside what a test does, which has to go on. The list gets the service's turns.

    A turn is what its loop computes before it looks at others again, in seconds of its own processor time, which a busy
    machine does not lengthen.
    """
    turns_s: list[float] = []
    goes_on, stop = threading.Event(), threading.Event()

    def read() -> None:
        with rig.new_client() as client, contextlib.suppress(_Stopped):
            while True:
                with client.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as answer:
                    for _ in answer.iter_raw():
                        goes_on.set()
                        if stop.is_set():
                            raise _Stopped

    async def watch() -> None:
        last_s = time.thread_time()
        while not stop.is_set():
            await asyncio.sleep(0.002)
            now_s = time.thread_time()
            turns_s.append(now_s - last_s)
            last_s = now_s

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert goes_on.wait(30)
        watching = rig.server.begin(watch())
        yield turns_s
        goes_on.clear()
        assert goes_on.wait(30)
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()
    watching.result(30)


class _Stopped(Exception):
    """The test has seen enough."""


def numbers(rig: ServiceRig) -> tuple[int, int]:
    stats = rig.stats()
    return stats["running"], stats["waiting"]


LEAVING: dict[str, tuple[str, dict[str, Any], Callable[[ServiceRig], bool]]] = {
    "whole": (COMPLETIONS, ENDLESS, lambda rig: numbers(rig) == (1, 0)),
    "whole with n": (COMPLETIONS, {**ENDLESS, "n": 4}, lambda rig: numbers(rig) == (4, 0)),
    "several prompts": (COMPLETIONS, {**ENDLESS, "prompt": [[1], [2], [3]]}, lambda rig: numbers(rig) == (3, 0)),
    "chat": (CHAT, {"messages": [{"role": "user", "content": "a"}], **LONG}, lambda rig: numbers(rig) == (1, 0)),
    "stream": (COMPLETIONS, {**ENDLESS, "stream": True}, lambda rig: numbers(rig) == (1, 0)),
    "stream with n": (COMPLETIONS, {**ENDLESS, "stream": True, "n": 4}, lambda rig: numbers(rig) == (4, 0)),
    "prefill": (COMPLETIONS, {**ENDLESS, "prompt": [1] * 3900, "max_tokens": 50}, lambda rig: numbers(rig)[0] == 1),
}


@pytest.mark.parametrize("case", LEAVING)
def test_a_client_that_leaves_frees_everything_it_had(rig: ServiceRig, case: str, scale: int) -> None:
    path, body, is_there = LEAVING[case]
    for _ in range(scale):
        with asking(rig, path, body) as connection:
            until(lambda: is_there(rig))
            if body.get("stream"):
                assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        rig.wait_idle()
    rig.live_probe()


def test_a_client_that_leaves_the_queue_frees_its_place_and_nobody_elses(rig: ServiceRig) -> None:
    with asking(rig, COMPLETIONS, {**ENDLESS, "n": NUM_SLOTS}):
        until(lambda: numbers(rig) == (NUM_SLOTS, 0))
        for stream in (False, True):
            with asking(rig, COMPLETIONS, {**ENDLESS, "stream": stream, "n": 2}):
                until(lambda: numbers(rig) == (NUM_SLOTS, 2))
            until(lambda: numbers(rig) == (NUM_SLOTS, 0))
    rig.wait_idle()
    rig.live_probe()


def test_after_many_that_left_every_slot_is_there(rig: ServiceRig) -> None:
    for _ in range(10):
        with asking(rig, COMPLETIONS, {**ENDLESS, "n": 2, "stream": True}):
            until(lambda: rig.drain.num_running == 1)
        until(lambda: rig.drain.num_running == 0)
    rig.wait_idle()
    answer = rig.client.post(COMPLETIONS, json={**ENDLESS, "max_tokens": 20, "n": NUM_SLOTS, "return_token_ids": True})
    assert [choice["token_ids"] for choice in answer.json()["choices"]] == [list(range(6, 26))] * NUM_SLOTS


def test_more_than_the_queue_takes_is_a_429_with_the_time_to_wait(rig: ServiceRig) -> None:
    with asking(rig, COMPLETIONS, {**ENDLESS, "n": NUM_SLOTS}):
        until(lambda: numbers(rig) == (NUM_SLOTS, 0))
        with asking(rig, COMPLETIONS, {**ENDLESS, "n": 8}):
            until(lambda: numbers(rig) == (NUM_SLOTS, 8))
            for stream in (False, True):
                answer = rig.client.post(COMPLETIONS, json={**ENDLESS, "stream": stream})
                assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
                assert answer.json()["error"]["code"] == "queue_full"
    rig.wait_idle()
    rig.live_probe()


def hostile_bodies() -> Iterator[tuple[str, bytes | Iterator[bytes], dict[str, str], set[int]]]:
    """A path, a body, headers besides, and the statuses that are right."""
    chat, prompt = (
        b'{"messages": [{"role": "user", "content": %s}], "max_tokens": 1}',
        b'{"prompt": %s, "max_tokens": 1}',
    )
    for text in (rb'"\ud83d"', rb'"x \ude00 y"'):
        yield CHAT, chat % text, {}, {400}
        yield COMPLETIONS, prompt % text, {}, {400}
    yield CHAT, chat % rb'"a\u0000b"', {}, {200, 400}
    yield CHAT, b'{"messages": [], "tools": ' + b"[" * 3000, {}, {400}
    yield CHAT, b'{"messages": [], "tools": ' + b"[" * 3000 + b"]" * 3000 + b"}", {}, {400}
    schema = b'{"a":' * 1000 + b"1" + b"}" * 1000
    yield CHAT, chat[:-1] % b'"a"' + b', "response_format": %s}' % schema, {}, {400}
    yield COMPLETIONS, b'{"prompt": "a", "prompt": "b"}', {}, {400}
    yield COMPLETIONS, prompt % b"1e999", {}, {400}
    yield COMPLETIONS, prompt % (b"[" + b"{}," * 600_000 + b"1]"), {}, {400}
    yield COMPLETIONS, prompt % (b"[" + b"1," * 1_000_000 + b"1]"), {}, {400}
    yield COMPLETIONS, b" " * 50_000_000, {}, {413}
    yield COMPLETIONS, (b" " * 500_000 for _ in range(100)), {}, {413}
    yield COMPLETIONS, b"\x1f\x8b" + b"\x00" * 1000, {"Content-Encoding": "gzip"}, {415}
    yield COMPLETIONS, '{"prompt": "a"}'.encode("utf-16"), {"Content-Type": "application/json; charset=utf-16"}, {415}
    yield COMPLETIONS, '{"prompt": "a"}'.encode("latin-1") + b"\xff", {}, {400}


def test_hostile_bodies_are_refused_quickly_and_a_stream_beside_them_goes_on(rig: ServiceRig) -> None:
    with streaming(rig) as turns_s:
        for path, content, more, right in hostile_bodies():
            answer = rig.client.post(path, content=content, headers={**dict(JSON_TYPE), **more})
            assert answer.status_code in right, answer.text[:500]
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert max(turns_s) < MAX_TURN_S
    rig.wait_idle()
    rig.live_probe()


HUGE: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 10**6}),
    ("best_of", {"best_of": 10**6}),
    ("stop", {"stop": [str(number) for number in range(100_000)]}),
    ("stop", {"stop": "x" * 10**6}),
    ("bad_words", {"bad_words": [str(number) for number in range(50_000)]}),
    ("logprobs", {"logprobs": 10**6}),
    ("prompt_logprobs", {"prompt_logprobs": 10**6}),
    ("prompt", {"prompt": ["a"] * 10_000}),
    ("logit_bias", {"logit_bias": {str(number): 1 for number in range(30_000)}}),
    ("max_tokens", {"max_tokens": 10**12}),
]


def test_small_bodies_that_order_huge_work_are_refused_by_name_and_a_stream_beside_them_goes_on(
    rig: ServiceRig,
) -> None:
    with streaming(rig) as turns_s:
        for param, huge in HUGE:
            answer = rig.client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, **huge})
            assert answer.status_code == 400, (param, answer.text[:500])
            assert re.split(r"[.\[]", str(answer.json()["error"]["param"]))[0] == param
    assert max(turns_s) < MAX_TURN_S
    rig.wait_idle()
    rig.live_probe()


def test_a_body_that_comes_in_pieces_and_several_requests_on_one_connection_are_answered(rig: ServiceRig) -> None:
    body = json.dumps({"prompt": [7], "max_tokens": 2, "temperature": 0, "return_token_ids": True}).encode()
    for size in (1, 7, len(body)):
        parts = (body[start : start + size] for start in range(0, len(body), size))
        answer = rig.client.post(COMPLETIONS, content=parts, headers=JSON_TYPE)
        assert answer.json()["choices"][0]["token_ids"] == [8, 9]


def test_ignored_fields_are_named_in_a_header_that_no_name_can_break(rig: ServiceRig) -> None:
    body = {"prompt": [7], "max_tokens": 1, "foo": 1, "a\r\nX-Evil: 1": 2, "\u00e9\U0001f600": 3}
    for stream in (False, True):
        answer = rig.client.post(COMPLETIONS, json={**body, "stream": stream})
        assert answer.status_code == 200
        assert answer.headers["x-metrale-ignored-fields"].startswith("foo, ")
        assert "x-evil" not in answer.headers


def test_an_unknown_model_and_an_engine_that_is_not_there_are_told(rig: ServiceRig) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
        answer = rig.client.post(path, json={"model": "other", **body})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        rig.backend.reason = "the engine starts"
        answer = rig.client.post(path, json=body)
        rig.backend.reason = ""
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert answer.headers["retry-after"] == "1"
    rig.live_probe()


def test_texts_and_conversations_become_token_ids_and_texts_again(rig: ServiceRig) -> None:
    for text in ("one two", "", "é\u0000😀" * 1000):
        ids = rig.client.post("/tokenize", json={"prompt": text}).json()
        assert ids["count"] == len(ids["tokens"])
        assert rig.client.post("/detokenize", json={"tokens": ids["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "one"}]
    ids = rig.client.post("/tokenize", json={"messages": messages, "return_token_strs": True}).json()
    assert "".join(ids["token_strs"]) == "user: one<|end|>assistant: "
    answer = rig.client.post(CHAT, json={"messages": messages, "max_tokens": 1})
    assert answer.json()["usage"]["prompt_tokens"] == ids["count"]
    long = rig.client.post("/tokenize", json={"prompt": "x" * 2 * 10**6})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_service_ends_in_order(model: Path) -> None:
    with serving(model) as rig, rig.new_client() as client:
        with client.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as answer:
            chunks = answer.iter_text()
            assert next(chunks).startswith("data: ")
            whole: list[httpx.Response] = []
            other = threading.Thread(target=lambda: whole.append(rig.client.post(COMPLETIONS, json=ENDLESS)))
            other.start()
            until(lambda: numbers(rig)[0] == 2)
            rig.server.call(rig.drain.run(0.05))
            rest = "".join(chunks)
            other.join(30)
        assert '"code":"shutting_down"' in rest
        assert "[DONE]" not in rest
        assert (whole[0].status_code, whole[0].json()["error"]["code"]) == (503, "shutting_down")
        rig.wait_idle()
        late = client.post(COMPLETIONS, json=ENDLESS)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
        assert client.get("/health/live").status_code == 200
        assert client.get("/health").status_code == 503


def test_a_request_that_takes_too_long_is_a_504(model: Path) -> None:
    limits = ServeLimits(max_request_s=0.2)
    with serving(model, settings=HttpSettings(api=ApiSettings(limits=limits))) as rig:
        answer = rig.client.post(COMPLETIONS, json={**ENDLESS, "n": 4})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        rest = rig.client.post(COMPLETIONS, json={**ENDLESS, "n": 4, "stream": True}).text
        assert '"code":"deadline_exceeded"' in rest
        rig.wait_idle()
        rig.live_probe()
