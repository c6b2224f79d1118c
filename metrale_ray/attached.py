# SPDX-License-Identifier: MIT OR Apache-2.0
"""`attach`: a driver of an engine that runs already, whoever started it: an `LLM`, `metrale-ray serve`, Ray Serve.

    with attach("my-engine") as llm:
        print(llm.generate("Hello")[0].outputs[0].text)

Rules: it is one more front of the engine, with a key and a session of its own, and takes its turn in the same queue.
Closing it ends what it asked for and leaves the engine. When the engine ends, every call raises EngineDead.
"""

from __future__ import annotations

import os
from pathlib import Path

from metrale_ray.cluster.address import check_address
from metrale_ray.cluster.running import RunningEngine
from metrale_ray.config import RAY_ADDRESS, EngineConfig
from metrale_ray.driver import Driver
from metrale_ray.errors import ConfigError
from metrale_ray.model.hub import find
from metrale_ray.serve.text import load_tokenizer

CLOSED = "this AttachedLLM was closed"
AUTO = "auto"  # the Ray that runs on this machine
# An engine that is starting has a name already.
START_TIMEOUT_S = 60.0


class AttachedLLM(Driver):
    """A driver of the engine with this name; see `attach`. `config`: the engine's settings."""

    def __init__(
        self,
        name: str,
        address: str | None = None,
        *,
        model: str | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        super().__init__(CLOSED)
        _check_name(name)
        check_address(address)
        self.name = name
        self._running = RunningEngine(name)
        try:
            self._steps.callback(self._running.close)
            way = self._running.find(address or os.environ.get(RAY_ADDRESS) or AUTO, timeout_s)
            self.config: EngineConfig = way.config
            self.model_path = _folder(name, way.config, model)
            self.tokenizer = load_tokenizer(self.model_path)
            self._open(self._running, way.config.max_queue_len)
            self.max_model_len = self._client.wait_opened(0).max_model_len
        except BaseException:
            self.close()
            raise


def attach(
    name: str, address: str | None = None, *, model: str | None = None, timeout_s: float = START_TIMEOUT_S
) -> AttachedLLM:
    """A driver of the engine that runs under `name` on the Ray at `address`.

    `address`: the Ray of this process where it has joined one, else RAY_ADDRESS, else the one on this machine. `model`:
    where the engine's checkpoint is here, if not where the engine has it: its tokenizer is read. `timeout_s`: how long
    the engine may still be starting.

    Raises UserError when no engine has this name, naming those that run; ConfigError when the checkpoint is not here;
    StartError when Ray cannot be reached or the engine is not ready in time; EngineDead when it has ended.
    """
    return AttachedLLM(name, address, model=model, timeout_s=timeout_s)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"name is {name!r}; it must be the name of an engine that runs, a text")


def _folder(name: str, config: EngineConfig, model: str | None) -> Path:
    """The checkpoint's folder here, for its tokenizer. Nothing is fetched: its weights are not needed here."""
    hint = f"; engine {name!r} has that checkpoint, and its tokenizer is needed here too: give model, its path here"
    try:
        folder = find(model or config.model, None if model else config.revision)
    except ConfigError as error:
        raise ConfigError(f"{error.message}{hint}") from error
    if folder is None:
        raise ConfigError(f"model {model or config.model!r} is not in the hub's cache here{hint}")
    return folder
