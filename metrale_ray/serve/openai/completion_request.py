# SPDX-License-Identifier: MIT OR Apache-2.0
"""`CompletionRequest`: the body of POST /v1/completions, and its prompts.

Rules: a prompt is a text or a list of token ids; a request has one, or a list of them. An empty list of prompts and an
empty list of token ids are refused; an empty text is the tokenizer's matter, which may put a first token before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, WithJsonSchema

from metrale_ray.sampling.checks import U32_MAX
from metrale_ray.sampling.token_params import MAX_LOGPROBS, MAX_N
from metrale_ray.serve.failures import bad_request
from metrale_ray.serve.openai import mistakes
from metrale_ray.serve.openai.call import ApiSettings
from metrale_ray.serve.openai.request import parse
from metrale_ray.serve.openai.sampling_fields import SamplingFields
from metrale_ray.serve.openai.unknown import NOT_ANYWHERE, Unsupported
from metrale_ray.serve.slices import slices

MAX_TOKEN_IDS = 2**21
"""Of all prompts of one request: more than any model's length, and looked at in less than 0.2 s."""

_NOT_IN_COMPLETIONS: dict[str, Unsupported] = {
    "suffix": Unsupported(("",), "Text is only added at the end."),
    "messages": Unsupported((), "They are for /v1/chat/completions; here give a prompt."),
    "max_completion_tokens": Unsupported((), "It is for chats; use max_tokens."),
    "top_logprobs": Unsupported((), "It is for chats; logprobs says how many."),
    "tools": Unsupported(([],), "They are for chats."),
    "tool_choice": Unsupported(("none", "auto"), "It is for chats."),
}

_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": U32_MAX}}
_FORMS = [
    {"type": "string"},
    {"type": "array", "minItems": 1, "items": {"type": "string"}},
    _IDS,
    {"type": "array", "minItems": 1, "items": _IDS},
]


def _prompt(given: Any) -> Any:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise ValueError("must be a text, a list of token ids, or a list of these")
    if given and isinstance(given[0], int | float):
        return _token_ids(given)
    for index, prompt in enumerate(given):
        if isinstance(prompt, list):
            _token_ids(prompt)
        elif not isinstance(prompt, str):
            raise ValueError(f"must hold texts or lists of token ids; entry {index} is {mistakes.shown(prompt)}")
    return given


def _token_ids(given: list[Any]) -> list[int]:
    """A prompt may have a million ids, so many are looked at together."""
    for ids in slices(given):
        if not set(map(type, ids)) <= {int}:
            index, one = next((index, one) for index, one in enumerate(given) if type(one) is not int)
            raise ValueError(f"must hold token ids, which are integers; entry {index} is {mistakes.shown(one)}")
        wrong = [one for one in (min(ids, default=0), max(ids, default=0)) if not 0 <= one <= U32_MAX]
        if wrong:
            raise ValueError(f"must hold token ids from 0 to the vocabulary's last; one is {mistakes.shown(wrong[0])}")
    return given


Prompt = Annotated[Any, AfterValidator(_prompt), WithJsonSchema({"anyOf": _FORMS})]


class CompletionRequest(SamplingFields):
    """Prompts to go on with."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {**NOT_ANYWHERE, **_NOT_IN_COMPLETIONS}
    most_number: ClassVar[Mapping[str, str]] = {
        **SamplingFields.most_number,
        "best_of": "max_best_of",
        "logprobs": "max_logprobs",
    }

    prompt: Prompt = Field(description="A text, a list of token ids, or a list of these.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Tell the log probability of each token, and those of so many likeliest ones.",
    )
    echo: bool = Field(False, description="Give the prompt before each answer.")
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_N,
        description="Generate so many answers and give the n with the highest mean log probability.",
    )
    add_special_tokens: bool = Field(True, description="Let the tokenizer add its special tokens to a text.")

    @property
    def num_generated(self) -> int:
        """Sequences for each prompt; `n` of them are given."""
        return self.n if self.best_of is None else self.best_of

    @property
    def generates_nothing(self) -> bool:
        """Whether the request asks about its prompts alone: max_tokens is 0."""
        return self.max_tokens == 0

    def check(self, settings: ApiSettings) -> None:
        """What holds for completions besides."""
        super().check(settings)
        self._check_best_of()
        if self.generates_nothing and not self.echo and self.prompt_logprobs is None:
            raise bad_request(
                "max_tokens is 0; it must be at least 1, unless echo or prompt_logprobs is given", param="max_tokens"
            )
        completion_prompts(self, settings)

    def _check_best_of(self) -> None:
        if self.best_of is None:
            return
        if self.best_of < self.n:
            raise bad_request(f"best_of is {self.best_of}; it must be at least n, which is {self.n}", param="best_of")
        if self.stream and self.best_of > self.n:
            raise bad_request(
                f"best_of is {self.best_of} and n is {self.n}; a stream cannot choose the best, so leave best_of out",
                param="best_of",
            )


def parse_completion(body: object, settings: ApiSettings) -> CompletionRequest:
    """The request of a parsed body. Raises ApiError 400."""
    if isinstance(body, dict):
        _check_count(body.get("prompt"), settings)
        _check_size(body.get("prompt"))
    return parse(CompletionRequest, body, settings)


def completion_prompts(request: CompletionRequest, settings: ApiSettings) -> list[str | list[int]]:
    """The request's prompts, one or many. Raises ApiError for none, for an empty list of ids, or for too many."""
    given = request.prompt
    _check_count(given, settings)
    prompts = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    if not prompts:
        raise bad_request("prompt is an empty list; give at least one prompt", param="prompt", code="empty_prompt")
    for index, prompt in enumerate(prompts):
        if prompt == []:
            raise bad_request(f"prompt {index} has 0 token ids; give at least one", param="prompt", code="empty_prompt")
    return prompts


def _check_count(given: object, settings: ApiSettings) -> None:
    most = settings.limits.max_prompts
    if isinstance(given, list) and len(given) > most and not isinstance(given[0], int | float):
        raise mistakes.over_limit("prompt", f"holds {len(given)} prompts", most, "max_prompts")


def _check_size(given: object) -> None:
    if not isinstance(given, list) or not given:
        return
    is_one = not isinstance(given[0], list | str)
    num_ids = len(given) if is_one else sum(len(prompt) for prompt in given if isinstance(prompt, list))
    if num_ids > MAX_TOKEN_IDS:
        raise bad_request(
            f"prompt has {num_ids} token ids; a request may have at most {MAX_TOKEN_IDS}. Send fewer.",
            param="prompt",
            code="context_length_exceeded" if is_one else "limit_exceeded",
        )
