# SPDX-License-Identifier: MIT OR Apache-2.0
"""`BatchOptions`: how the requests of a batch are read and answered, as a service's options would say it."""

from __future__ import annotations

from dataclasses import dataclass, field

from metrale_ray.config import EngineConfig
from metrale_ray.errors import ConfigError
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.openai.call import ApiSettings
from metrale_ray.serve.options import ModelOptions

MAX_CONCURRENCY = 16_384
"""Requests in flight; each takes a task and holds its body."""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Raises ConfigError for a value that is none.

    `served_model_name`: what requests may call the model, one name or several; its folder where none is given.
    `chat_template`: a file in place of the checkpoint's. `tool_parser`, `reasoning_parser`: how answers are read, None
    for not at all. `concurrency`: requests in flight, twice the sequences of a step where it is None. `retry_errors`:
    what OUTPUT has as errors is asked again. `strict`: unknown fields are errors. `allow_request_templates`: a request
    may bring a chat template of its own.
    """

    served_model_name: str | tuple[str, ...] = ()
    chat_template: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    concurrency: int | None = None
    retry_errors: bool = False
    strict: bool = False
    allow_request_templates: bool = False
    limits: ServeLimits = field(default_factory=ServeLimits)

    def __post_init__(self) -> None:
        number = self.concurrency
        if number is not None and (type(number) is not int or not 1 <= number <= MAX_CONCURRENCY):
            raise ConfigError(f"concurrency is {number!r}; it must be an integer from 1 to {MAX_CONCURRENCY}")
        for name in ("retry_errors", "strict", "allow_request_templates"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be true or false")
        self.of_model("model")

    def of_model(self, model: str) -> ModelOptions:
        """The part that a service has for each model; `model` is its folder. Raises ConfigError."""
        names = self.served_model_name
        return ModelOptions(
            EngineConfig(model=model),
            names=(names,) if isinstance(names, str) else names,
            chat_template=self.chat_template,
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
        )

    @property
    def settings(self) -> ApiSettings:
        """What the code that answers a service's requests is told."""
        return ApiSettings(self.limits, self.strict, self.allow_request_templates)
