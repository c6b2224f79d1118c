# SPDX-License-Identifier: MIT OR Apache-2.0
"""What an `LLM` stands on, played by a test: a cluster that starts at once, and a session whose outputs a test says."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from metrale_ray.config import EngineConfig
from metrale_ray.errors import EngineDead
from metrale_ray.protocol.front import Opened, Output, RequestHandle
from metrale_ray.protocol.front.messages import Abort, Finish
from metrale_ray.protocol.front.params_map import PackedParams
from tests.fixtures.tiny import VOCAB_SIZE

SOON_S = 10.0  # ten times what a busy machine takes


class PlayedCluster:
    """Keeps what was done with it. `ended`: what it says of its ranks, once that is set."""

    made: list[PlayedCluster]

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.front_address, self.front_keys, self.head_key = "tcp://head", None, ""
        self.done: list[str] = []
        self.ended: Callable[[], EngineDead | None] = lambda: None
        self.changed = threading.Event()
        self.made.append(self)

    def start(self, on_state: Callable[[Any], None]) -> None:
        self.done.append("start")

    def wait_ended(self, timeout_s: float) -> EngineDead | None:
        self.changed.wait(timeout_s)
        return self.ended()

    def end(self, ended: Callable[[], EngineDead | None]) -> None:
        self.ended = ended
        self.changed.set()

    def stats(self) -> dict[str, Any]:
        return {"running": 0}

    def stop(self) -> None:
        self.done.append("stop")
        self.changed.set()

    def close(self) -> None:
        self.done.append("close")


class PlayedClient:
    """A session with a head that a test plays. `on_submit` runs on the loop's thread."""

    made: list[PlayedClient]

    def __init__(self, *where: Any) -> None:
        self.death: EngineDead | None = None
        self.died = threading.Event()
        self.handles: list[RequestHandle] = []
        self.said: list[Abort | Finish] = []
        self.heard = threading.Event()  # something was said to the head
        self.submitted = threading.Event()
        self.on_submit: Callable[[RequestHandle], None] = lambda handle: None
        self.made.append(self)

    def wait_opened(self, timeout_s: float) -> Opened:
        return Opened(100, VOCAB_SIZE, 1)

    def submit(self, token_ids: Sequence[int], params: PackedParams, **more: Any) -> RequestHandle:
        handle = RequestHandle(len(self.handles), self._hear, params.params.n)
        self.handles.append(handle)
        self.on_submit(handle)
        self.submitted.set()
        return handle

    def die(self, reason: str, rank: int | None = None) -> None:
        if self.death is None:
            self.death = EngineDead(reason, rank=rank)
            for handle in self.handles:
                handle.die(self.death)
            self.died.set()

    def close(self) -> None:
        self.die("this front was closed")

    def _hear(self, message: Abort | Finish) -> None:
        self.said.append(message)
        self.heard.set()


def answer(handle: RequestHandle) -> None:
    """One token, and the end."""
    handle.put(Output(handle.request_id, 0, (7,), finish_reason="length"))


def one_token(handle: RequestHandle) -> None:
    """One token of more."""
    handle.put(Output(handle.request_id, 0, (7,)))


class Call:
    """A call in a thread of its own: what it gave, or raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.result: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ended(self) -> bool:
        self._thread.join(SOON_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:  # noqa: BLE001  # a test looks at it
            self.error = error


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """The garbage collector runs only when it is told to."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def forget(stream: Iterator[Any]) -> None:
    """Begin to read and forget about it, in a cycle, so that only the collector ends it."""
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)
