# SPDX-License-Identifier: MIT OR Apache-2.0
"""`FakeServer`: a server over real sockets that answers as it is told, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import uvicorn

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
KEY = "sk-secret"


class FakeServer:
    """What it answers. `refused`: fields of a request that are a 400; `pieces`: the texts of an answer.

    `hold`: no answer begins before so many requests are there at once. `failures`: for request number n (the probe
    aside), what it gets instead: an HTTP status, or "event" (an error in the stream), "cut" (no end), "garbage".
    """

    def __init__(self) -> None:
        self.url = ""
        self.refused: tuple[str, ...] = ()
        self.pieces = ["one", " two", "", " three"]
        self.hold = 0
        self.holds_for_good = False
        self.failures: dict[int, int | str] = {}
        self.has_usage = True
        self.has_tokenizer = True
        self.is_locked = False
        self.in_one_write = False
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.num_running = 0
        self.most_running = 0
        self.held = threading.Event()  # set when the requests that are held are all there
        self._open = asyncio.Event()

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The requests of the load, without those that learned what is taken."""
        return [body for body in self.bodies if _length(body) != 1]

    async def app(self, scope: Message, receive: Receive, send: Send) -> None:
        """The server as an ASGI application."""
        message = await receive()
        content = message["body"]
        while message.get("more_body"):
            message = await receive()
            content += message["body"]
        self.paths.append(scope["path"])
        if self.is_locked and (b"authorization", f"Bearer {KEY}".encode()) not in scope["headers"]:
            await _reply(send, 401, _error("wrong key", "invalid_api_key"))
        elif scope["path"] == "/v1/models":
            await _reply(send, 200, {"object": "list", "data": [{"id": "first"}, {"id": "second"}]})
        elif scope["path"] == "/tokenize" and self.has_tokenizer:
            num_words = len(json.loads(content)["prompt"].split())
            await _reply(send, 200, {"tokens": list(range(100, 100 + 2 * num_words))})
        elif scope["path"] in ("/v1/completions", "/v1/chat/completions"):
            await self._answer(scope["path"], json.loads(content), send)
        else:
            await _reply(send, 404, {"detail": "Not Found"})

    async def _answer(self, path: str, body: dict[str, Any], send: Send) -> None:
        number = len(self.asked)
        self.bodies.append(body)
        refused = [field for field in self.refused if field in body or field == type(body.get("prompt")).__name__]
        if refused:
            await _reply(send, 400, _error(f"prompt or field not supported: {refused[0]}", "invalid_request"))
            return
        failure = None if _length(body) == 1 else self.failures.get(number)
        if isinstance(failure, int):
            await _reply(
                send, failure, _error(f"no, {failure}", f"code_{failure}") if failure != 502 else "Bad Gateway"
            )
            return
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await self._wait(body)
        await self._stream(path, body, send, failure)
        self.num_running -= 1

    async def _wait(self, body: dict[str, Any]) -> None:
        if not self.hold or _length(body) == 1:
            return
        if self.num_running >= self.hold:
            self.held.set()
            if not self.holds_for_good:
                self._open.set()
        await self._open.wait()

    async def _stream(self, path: str, body: dict[str, Any], send: Send, failure: str | None) -> None:
        await send(_start(200, b"text/event-stream; charset=utf-8"))
        events = [_event(choice) for choice in self._choices(path)]
        if failure == "event":
            events[2:] = [b"data: " + json.dumps(_error("expert 3 failed", "command_failed")).encode() + b"\r\n\r\n"]
        elif failure == "garbage":
            events[2:] = [b"data: {nothing\n\n", b"data: [DONE]\n\n"]
        elif failure == "cut":
            events = events[:2]
        else:
            if self.has_usage and body.get("stream_options", {}).get("include_usage"):
                usage = {"prompt_tokens": _num_input(body), "completion_tokens": _length(body)}
                events.append(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
            events.append(b"data: [DONE]\n\n")
        for event in [b"".join(events)] if self.in_one_write else events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _choices(self, path: str) -> Iterator[dict[str, Any]]:
        is_chat = "chat" in path
        if is_chat:
            yield {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        for piece in self.pieces:
            yield {"index": 0, **({"delta": {"content": piece}} if is_chat else {"text": piece}), "finish_reason": None}
        yield {"index": 0, **({"delta": {}} if is_chat else {"text": ""}), "finish_reason": "length"}


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    """The server on a free port of this machine, on a thread, until the end of the block."""
    listener = socket.create_server(("127.0.0.1", 0))  # listens from here on: whoever comes early waits
    server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(server.app, interface="asgi3", lifespan="off", log_level="warning")
    inner = uvicorn.Server(config)
    thread = threading.Thread(target=inner.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        inner.should_exit = inner.force_exit = True  # whoever still waits for an answer waits for good
        thread.join(20)
        listener.close()
    assert not thread.is_alive()


def _length(body: dict[str, Any]) -> int:
    length: int = body["max_tokens"] if "max_tokens" in body else body["max_completion_tokens"]
    return length


def _num_input(body: dict[str, Any]) -> int:
    prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def _error(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "some_error", "param": None, "code": code}}


def _event(choice: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"id": "x-1", "choices": [choice], "usage": None}).encode() + b"\n\n"


def _start(status: int, content_type: bytes) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type)]}


async def _reply(send: Send, status: int, content: Any) -> None:
    await send(_start(status, b"application/json"))
    body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
    await send({"type": "http.response.body", "body": body, "more_body": False})
