# SPDX-License-Identifier: MIT OR Apache-2.0
"""A front server on a loop of its own thread, and a raw front that can say anything, for the tests of the session."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from metrale_ray.protocol.front.client import FrontClient
from metrale_ray.protocol.front.frames import decode_from_head, encode
from metrale_ray.protocol.front.messages import Abort, Finish, FromFront, FromHead, Open, Opened, Output, Submit
from metrale_ray.protocol.front.server import FrontId, FrontServer
from metrale_ray.protocol.keys import call_with, new_keys

WAIT_S = 20.0  # what should come at once may take this long on a busy machine; nothing waits for it to pass
HEAD_KEYS, FRONT_KEYS = new_keys(), new_keys()
OPENED = Opened(max_model_len=128, vocab_size=320, engine_epoch=3)


class Rig:
    """`messages` holds what the head got, `gone` the fronts that left or were dropped."""

    def __init__(self, host: str = "127.0.0.1", **settings: Any) -> None:
        self.messages: queue.SimpleQueue[tuple[FrontId, Submit | Abort | Finish]] = queue.SimpleQueue()
        self.gone: queue.SimpleQueue[FrontId] = queue.SimpleQueue()
        self.loop = asyncio.new_event_loop()
        self.server = FrontServer(host, self.on_message, self.gone.put, lambda: OPENED, HEAD_KEYS, **settings)
        self.server.allow(FRONT_KEYS.public)
        self.thread = threading.Thread(target=self.loop.run_forever, name="head-loop")
        self.thread.start()
        self.wait(self.server.start())

    def on_message(self, front_id: FrontId, message: Submit | Abort | Finish) -> None:
        self.messages.put((front_id, message))

    def wait(self, work: Any) -> Any:
        """Run a coroutine on the head's loop to its end."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function on the head's loop."""

        async def work() -> Any:
            return function(*arguments)

        return self.wait(work())

    def post(self, front_id: FrontId, *outputs: Output) -> None:
        self.call(self.server.post, front_id, outputs)

    def next_message(self) -> tuple[FrontId, Any]:
        return self.messages.get(timeout=WAIT_S)

    def next_gone(self) -> FrontId:
        return self.gone.get(timeout=WAIT_S)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT_S)
        self.loop.close()


@contextmanager
def running(**settings: Any) -> Iterator[Rig]:
    """A rig that is closed at the end; `settings` go to the server."""
    rig = Rig(**settings)
    try:
        yield rig
        rig.wait(rig.server.close())
        assert rig.server.failure is None
    finally:
        rig.stop()


def front_client(address: str, **settings: float) -> FrontClient:
    """A front that the rig's server allows."""
    return FrontClient(address, FRONT_KEYS, HEAD_KEYS.public, **settings)


class RawFront:
    """A socket that says exactly what a test wants it to."""

    def __init__(self, address: str, *, opens: bool = True) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, round(WAIT_S * 1000))
        call_with(self.socket, FRONT_KEYS, HEAD_KEYS.public)
        self.socket.connect(address)
        if opens:
            self.say(Open())
            assert self.hear() == OPENED

    def say(self, message: FromFront) -> None:
        self.socket.send(encode(message))

    def say_bytes(self, *parts: bytes) -> None:
        self.socket.send_multipart(list(parts))

    def hear(self) -> FromHead:
        return decode_from_head(self.socket.recv())

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextmanager
def raw_front(address: str, *, opens: bool = True) -> Iterator[RawFront]:
    front = RawFront(address, opens=opens)
    try:
        yield front
    finally:
        front.close()
