# SPDX-License-Identifier: MIT OR Apache-2.0
"""The routes of tokenizers are work: they end when their client goes or their time is up, and hold up nobody else."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from typing import Any

from metrale_ray.serve.http.settings import HttpSettings
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.openai.call import ApiSettings
from metrale_ray.serve.text import Tokenizer
from metrale_ray.serve.text_threads import LONG_CHARACTERS, NUM_THREADS
from tests.serve.http.asgi import JSON, Client, Exchange, NoEngine, app_of, asked, model_of
from tests.serve.pieces import Pieces


class HeldPieces(Pieces):
    """Encodes a text when it is let go, and remembers how many it was given."""

    def __init__(self) -> None:
        super().__init__(["a"])
        self.begun, self.go, self.num_given = threading.Semaphore(0), threading.Event(), 0

    def encode(self, text: str, **more: Any) -> list[int]:
        self.num_given += 1
        self.begun.release()
        assert self.go.wait(30)
        return [0] * 3


def app_with(pieces: HeldPieces, **limits: Any) -> Any:
    model = dataclasses.replace(model_of(NoEngine()), tokenizer=Tokenizer(pieces, []), max_model_len=10_000)
    return app_of(HttpSettings(ApiSettings(ServeLimits(**limits))), model)


def tokenizing(app: Any, client: Client) -> asyncio.Task[Exchange]:
    return asyncio.ensure_future(asked(app, "POST", "/tokenize", [JSON], client))


def long_text() -> Client:
    return Client([json.dumps({"prompt": "a" * (LONG_CHARACTERS + 1)}).encode()])


def test_clients_that_leave_a_long_text_keep_no_thread_that_others_need_and_are_not_worked_for() -> None:
    async def script() -> None:
        pieces = HeldPieces()
        app = app_with(pieces)
        clients = [long_text() for _ in range(20)]
        tasks = [tokenizing(app, client) for client in clients]
        for _ in range(NUM_THREADS):
            assert await asyncio.to_thread(pieces.begun.acquire, True, 30)
        while app.state.drain.num_running < len(clients):
            await asyncio.sleep(0)
        for client in clients:
            client.left.set()
        assert {exchange.status for exchange in await asyncio.gather(*tasks)} == {499}
        assert app.state.drain.num_running == 0
        assert await asyncio.to_thread(lambda: "free") == "free"
        pieces.go.set()
        exchange = await tokenizing(app, long_text())
        assert (exchange.status, exchange.json["count"]) == (200, 3)
        assert pieces.num_given == NUM_THREADS + 1

    asyncio.run(script())


def test_a_text_that_takes_longer_than_a_request_may_is_told_so() -> None:
    async def script() -> None:
        pieces = HeldPieces()
        exchange = await tokenizing(app_with(pieces, max_request_s=0.01), long_text())
        pieces.go.set()
        assert (exchange.status, exchange.code) == (504, "deadline_exceeded")

    asyncio.run(script())


def test_nothing_is_tokenized_during_the_end_of_the_service() -> None:
    async def script() -> None:
        app = app_with(HeldPieces())
        app.state.drain.begin()
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [0]})):
            exchange = await asked(app, "POST", path, [JSON], Client([json.dumps(body).encode()]))
            assert (exchange.status, exchange.code) == (503, "draining")

    asyncio.run(script())
