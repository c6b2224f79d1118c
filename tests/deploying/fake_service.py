# SPDX-License-Identifier: MIT OR Apache-2.0
"""A server that answers as it is told, right or wrong: for tests of what asks a service.

`FakeService(changes)` answers as a service with one model does; `changes` has other answers, by what is asked: "ready",
"models", "chat" and "stream". Several answers are given one after the other, the last one again and again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

MODEL = "a-model"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `hangs`: it never comes. `missing_bytes`: so many fewer are sent than the headers say."""

    status: int = 200
    body: str = ""
    kind: str = "application/json"
    hangs: bool = False
    missing_bytes: int = 0


def chat(message: Mapping[str, Any], finish_reason: str | None = "stop") -> Answer:
    """A whole answer to a chat."""
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return Answer(body=json.dumps({"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice]}))


def stream(*events: Any) -> Answer:
    """A stream of events; a text is sent as it is."""
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return Answer(body="".join(f"data: {line}\n\n" for line in lines), kind="text/event-stream")


def delta(delta: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    """One event of a stream."""
    return {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


RIGHT = {
    "ready": Answer(body='{"status": "ready"}'),
    "models": Answer(body=json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]})),
    "chat": chat({"role": "assistant", "content": "Paris."}),
    "stream": stream(
        delta({"role": "assistant", "content": ""}), delta({"content": "Paris."}), delta({}, "stop"), "[DONE]"
    ),
}
PLACES = {"/health/ready": "ready", "/v1/models": "models"}


class FakeService:
    """Listens on a free port of this machine. `asked` has what came: place, headers and body of each request."""

    def __init__(self, changes: Mapping[str, Answer | Sequence[Answer]]) -> None:
        self._answers = {
            place: [answer] if isinstance(answer, Answer) else list(answer)
            for place, answer in {**RIGHT, **changes}.items()
        }
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        self.has_been_asked = threading.Event()
        self._ends = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeService:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _next(self, handler: BaseHTTPRequestHandler) -> Answer:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        place = PLACES.get(handler.path) or ("stream" if json.loads(body).get("stream") else "chat")
        self.asked.append((place, dict(handler.headers), body))
        self.has_been_asked.set()
        answers = self._answers[place]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = service._next(self)
                if answer.hangs:
                    service._ends.wait()
                    return
                body = answer.body.encode()
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: len(body) - answer.missing_bytes])

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_: Any) -> None:
                """What is asked is in `asked`."""

        return Handler
