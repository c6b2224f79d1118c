# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the HTTP side knows of one model: where its engine is, how it is, and how its texts are made and read.

Rules: an engine may come, go and come back while the service stands, so nobody keeps a `Front`: each request asks
`Backend.front()` for it. What it leaves out: how the engine is found (`service`, `serve.deployment`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from metrale_ray.errors import EngineDead
from metrale_ray.serve.failures import ApiError, bad_request
from metrale_ray.serve.front import Front
from metrale_ray.serve.structured import GrammarChecks
from metrale_ray.serve.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Health:
    """How an engine is now. A reason is "" where all is well.

    `is_ready`: it has produced a real token since it came, it is heard of, and it moves. `is_moving`: no work waits, or
    a command completed not long ago.
    """

    is_ready: bool
    ready_reason: str
    is_moving: bool
    moving_reason: str


class Backend(Protocol):
    """One engine, seen from a front."""

    def front(self) -> Front:
        """The way to ask it something. Raises ApiError 503, saying why, while there is none."""
        ...

    def health(self) -> Health:
        """How it is now; never waits."""
        ...

    def figures(self) -> Mapping[str, Any]:
        """What the head last told of itself (see `figures`), {} before it did; never waits."""
        ...

    async def explain(self, seen: EngineDead) -> EngineDead:
        """The death as a caller is told it: what was seen, or soon after, what is known of the rank at fault."""
        ...


class ChatTemplate(Protocol):
    """Lays out conversations as text, within limits of time and size."""

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The text of `messages`, which are normal ones. `template` instead of the model's own. Raises RequestError."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What generation_config.json says for requests that leave a field out; None: it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model of a service. `names`: those that clients may use, its own first. `created`: seconds since 1970.

    `tool_parser`, `reasoning_parser`: names of `serve.parsing`, None for none. `grammars` looks at grammars from
    clients before the head gets them; None: the head alone does.
    """

    names: tuple[str, ...]
    backend: Backend
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    defaults: GenerationDefaults
    max_model_len: int
    created: int
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    grammars: GrammarChecks | None = None


def model_named(models: Sequence[ServedModel], name: str | None) -> ServedModel:
    """The model of this name; None is the only one there is. Raises ApiError 404 or 400."""
    if name is None:
        if len(models) > 1:
            raise bad_request(f"model is missing; there are {_names(models)}", param="model")
        return models[0]
    for model in models:
        if name in model.names:
            return model
    message = f"there is no model {name[:200]!r} here; there are {_names(models)}"
    raise ApiError(404, message, code="model_not_found", param="model")


def _names(models: Sequence[ServedModel]) -> str:
    return ", ".join(name for model in models for name in model.names)
