# SPDX-License-Identifier: MIT OR Apache-2.0
"""A `Driver` of an engine in this process, without Ray: real head, workers, sockets and text."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from metrale_ray.driver import Driver
from metrale_ray.errors import EngineDead
from metrale_ray.protocol.keys import new_keys
from metrale_ray.serve.text import load_tokenizer
from tests.test_head import Process

CLOSED = "this driver was closed"


class InProcessEngine:
    """What a driver needs of `process`. `end` says that the engine has ended, and why."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.front_keys = new_keys()
        self.front_address = process.head.front_address
        self.head_key = process.head.public_key
        self._death: EngineDead | None = None
        self._news = threading.Event()
        process.allow(self.front_keys.public)

    def end(self, death: EngineDead) -> None:
        self._death = death
        self._news.set()

    def wait_ended(self, timeout_s: float) -> EngineDead | None:
        self._news.wait(timeout_s)
        return self._death

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self._process.call(self._process.head.stats())
        return found

    def stop(self) -> None:
        self._news.set()


class InProcessDriver(Driver):
    """One more front of `process`, whose checkpoint is in `model`."""

    def __init__(self, process: Process, model: Path, name: str = "mine") -> None:
        super().__init__(CLOSED)
        self.name = name
        self.config = process.config
        self.engine = InProcessEngine(process)
        try:
            self.tokenizer = load_tokenizer(model)
            self._open(self.engine, process.config.max_queue_len)
        except BaseException:
            self.close()
            raise
