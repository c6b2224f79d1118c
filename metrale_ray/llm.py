# SPDX-License-Identifier: MIT OR Apache-2.0
"""`LLM`: the Python driver. It starts an engine on Ray, turns text into token ids and back, and streams.

    with LLM(model="path/to/checkpoint", ep_size=2) as llm:
        for out in llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=16)):
            print(out.outputs[0].text)

Rules: the engine ends with it. What can be asked is in `driver`.
"""

from __future__ import annotations

from typing import Any

from metrale_ray.cluster import Cluster
from metrale_ray.cluster.address import check_address
from metrale_ray.config import EngineConfig, from_mapping
from metrale_ray.driver import Driver
from metrale_ray.errors import ConfigError
from metrale_ray.model_files import open_model
from metrale_ray.progress import LoadProgress

CLOSED = "this LLM was closed"


class LLM(Driver):
    """An engine and its driver. `model` is a checkpoint folder, a hub id, or a whole EngineConfig.

    Settings are EngineConfig's fields. A process is in one Ray at a time: where it has joined one already, that one is
    used. Raises ConfigError, CheckpointError, StartError and their kinds; nothing is
    left running then. Close it, or use it in a `with` statement: its engine ends with it.
    """

    def __init__(self, model: str | EngineConfig | None = None, **settings: Any) -> None:
        super().__init__(CLOSED)
        config = _config(model, settings)
        check_address(config.address)  # the one in the environment is for whoever starts Ray
        self.config = config.resolved()
        files = open_model(self.config)  # refuse before Ray starts
        self.model_path = files.path
        self.max_model_len = files.max_model_len
        self.tokenizer = files.tokenizer
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """The engine's name on its Ray, by which others may `attach`."""
        return self._cluster.name

    def _start(self) -> None:
        self._cluster = Cluster(self.config)
        self._steps.callback(self._cluster.close)
        with LoadProgress(self.config.ep_size) as progress:
            self._cluster.start(progress.update)
        self._open(self._cluster, self.config.max_queue_len)


def _config(model: str | EngineConfig | None, settings: dict[str, Any]) -> EngineConfig:
    if isinstance(model, EngineConfig):
        if settings:
            raise ConfigError(f"settings {', '.join(settings)} were given beside a whole EngineConfig; put them in it")
        return model
    return from_mapping(settings if model is None else {"model": model, **settings})
