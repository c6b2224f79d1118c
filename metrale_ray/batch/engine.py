# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a batch needs of a driver (`LLM`): the way to its engine, and how its model's texts are made and read."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from metrale_ray.config import EngineConfig
from metrale_ray.serve.backend import Backend
from metrale_ray.serve.text import Tokenizer


class BatchEngine(Protocol):
    """A driver of an engine that is ready."""

    @property
    def config(self) -> EngineConfig:
        """The engine's settings."""
        ...

    @property
    def model_path(self) -> Path:
        """The checkpoint's folder."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for a checkpoint without one."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of one sequence, prompt and answer."""
        ...

    def backend(self) -> Backend:
        """The engine as a service's code asks it."""
        ...


class OpenEngine(Protocol):
    """Gives a driver whose engine runs while the context is open, such as `lambda: LLM("path/to/checkpoint")`."""

    def __call__(self) -> AbstractContextManager[BatchEngine]: ...
