# SPDX-License-Identifier: MIT OR Apache-2.0
"""A driver in this process, without Ray: head and workers as threads, as a batch asks them. The model is SUCC.

And the files of a batch: requests by their ids, and what stands in OUTPUT.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metrale_ray.errors import EngineDead
from metrale_ray.protocol.front import FrontClient
from metrale_ray.serve.backend import Backend
from metrale_ray.serve.front import Front
from metrale_ray.serve.session_backend import SessionBackend
from metrale_ray.serve.text import Tokenizer, load_tokenizer
from tests.test_head import TIMEOUT_S, Process, running, until

NAME = "succ"
MAX_MODEL_LEN = 4000


@dataclass
class RigEngine:
    """What a batch needs of an `LLM`."""

    model_path: Path
    process: Process
    client: FrontClient
    max_waiting: int
    max_model_len: int = MAX_MODEL_LEN

    def __post_init__(self) -> None:
        self.config = self.process.config
        self.tokenizer: Tokenizer | None = load_tokenizer(self.model_path)

    def backend(self) -> Backend:
        front = Front(self.client, self.tokenizer, max_waiting=self.max_waiting)
        return SessionBackend(self.client, front, self.explain)

    async def explain(self, seen: EngineDead) -> EngineDead:
        return seen

    def stats(self) -> dict[str, Any]:
        """The head's figures."""
        return self.client.ask(TIMEOUT_S)

    def is_idle(self) -> bool:
        """Whether nothing runs or waits in it, or soon will not."""
        until(lambda: not self.stats()["has_work"])
        return True


@contextmanager
def rig_engine(model: Path, ep_size: int = 2, *, max_waiting: int = 1000, **settings: Any) -> Iterator[RigEngine]:
    """An engine over `model` (see `tests.service_rig.write_model`); `settings` are EngineConfig's."""
    with running(model, ep_size, **{"max_model_len": MAX_MODEL_LEN, **settings}) as (process, client):
        yield RigEngine(model, process, client, max_waiting)


def completion(custom_id: str, first: int = 3, **body: Any) -> dict[str, Any]:
    """One request: the answer counts up from `first`."""
    asked = {"model": NAME, "prompt": [first], "max_tokens": 4, "temperature": 0, "ignore_eos": True, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": asked}


def chat(custom_id: str, content: str = "one two", **body: Any) -> dict[str, Any]:
    """One request."""
    messages = [{"role": "user", "content": content}]
    asked = {"model": NAME, "messages": messages, "max_tokens": 4, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": asked}


def write_lines(path: Path, lines: Sequence[Mapping[str, Any] | str]) -> Path:
    """Each is a line: an object, or a text that is one already."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What stands in a file of lines, each of which must be whole."""
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.split("\n")[:-1]]


def by_id(path: Path) -> dict[str | None, dict[str, Any]]:
    """The lines of OUTPUT by their ids, of which each is there once."""
    lines = read_lines(path)
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found
