# SPDX-License-Identifier: MIT OR Apache-2.0
"""`SamplingFields`: what chat and completions have in common: how tokens are chosen, when they end, how they come.

Rules: names are OpenAI's and vLLM's. A field that is not given is None where the model's generation_config.json may
have a value for it (`parameters` joins them).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NotRequired

from pydantic import AfterValidator, Field, with_config
from typing_extensions import TypedDict

from metrale_ray.protocol.limits import I32_MAX, I32_MIN
from metrale_ray.sampling.checks import U32_MAX, U64_MAX
from metrale_ray.sampling.params import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS
from metrale_ray.sampling.token_params import (
    MAX_ADDED_PENALTY,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
)
from metrale_ray.serve.failures import bad_request
from metrale_ray.serve.openai import mistakes
from metrale_ray.serve.openai.call import ApiSettings
from metrale_ray.serve.openai.fields import ListOf, SchemaOrText, StopTexts, TokenId
from metrale_ray.serve.openai.inner_fields import Known
from metrale_ray.serve.openai.request import Request
from metrale_ray.serve.openai.structured import (
    OPEN,
    Choices,
    Constraint,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOptions,
    check_constraint,
    constraint,
)

_DECIMAL = "^(0|[1-9][0-9]{0,9})$"

TokenKey = Annotated[str, Field(pattern=_DECIMAL)]
"""A token id as a key."""

Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Penalty = Annotated[float, Field(ge=-MAX_ADDED_PENALTY, le=MAX_ADDED_PENALTY)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]


def _unsigned(seed: int) -> int:
    """Clients have signed seeds or unsigned ones; the engine has unsigned ones."""
    return seed % (U64_MAX + 1)


Seed = Annotated[int, Field(ge=-(2**63), le=U64_MAX), AfterValidator(_unsigned)]


@with_config(OPEN)
class StreamOptions(TypedDict):
    """What a stream tells besides."""

    include_usage: NotRequired[Annotated[bool | None, Field(description="A last chunk with the usage, no choices.")]]
    continuous_usage_stats: NotRequired[Annotated[bool | None, Field(description="The usage so far in each chunk.")]]


class SamplingFields(Request):
    """The common fields."""

    most_items: ClassVar[Mapping[str, str]] = {"stop": "max_stop_strings", "logit_bias": "max_logit_biases"}
    most_number: ClassVar[Mapping[str, str]] = {"n": "max_n", "prompt_logprobs": "max_logprobs"}
    parts: ClassVar[Mapping[str, Known]] = {
        "stream_options": Known(tuple(StreamOptions.__annotations__)),
        "response_format": Known(
            tuple(ResponseFormat.__annotations__), {"json_schema": Known(tuple(JsonSchemaFormat.__annotations__))}
        ),
        "structured_outputs": Known(tuple(StructuredOptions.__annotations__)),
    }

    model: str | None = Field(None, description="The model's name. May be left out where one model is served.")
    n: int = Field(1, ge=1, le=MAX_N, description="Answers for each prompt.")
    stream: bool = Field(False, description="Send the answer as it grows, as server-sent events.")
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(
        None,
        ge=0,
        le=U32_MAX,
        description="At most so many tokens are generated. More than fit is no mistake: the answer then ends where the "
        "model's length limit is, with finish_reason length. 0 is for prompt_logprobs or echo alone.",
    )
    min_tokens: int = Field(0, ge=0, le=U32_MAX, description="No token ends the answer before it has so many.")
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE, description="0 takes the likeliest token.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=U32_MAX, description="0 and -1 keep all tokens.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: Seed | None = Field(
        None, description="The same seed and request give the same tokens. A negative one is the same as 2**64 more."
    )
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: float | None = Field(None, gt=0, le=MAX_REPETITION_PENALTY)
    logit_bias: dict[TokenKey, Bias] | None = Field(
        None,
        description="What to add to the logits of token ids.",
        json_schema_extra={"propertyNames": {"pattern": _DECIMAL}},
    )
    allowed_token_ids: Annotated[ListOf[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[ListOf[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    stop: StopTexts | None = Field(None, description="Texts that end the answer.")
    stop_token_ids: Annotated[ListOf[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Tell the log probabilities of the prompt's tokens."
    )
    return_token_ids: bool = Field(False, description="Tell the token ids of prompt and answers.")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOptions | None = None
    guided_json: SchemaOrText | None = Field(None, json_schema_extra={"deprecated": True})
    guided_regex: str | None = Field(None, json_schema_extra={"deprecated": True})
    guided_choice: Choices | None = Field(None, json_schema_extra={"deprecated": True})
    guided_grammar: str | None = Field(None, json_schema_extra={"deprecated": True})
    priority: int = Field(0, ge=I32_MIN, le=I32_MAX, description="The lower number goes first.")
    user: str | None = Field(None, description="Taken, and not used.")
    metadata: dict[str, Any] | None = Field(None, description="Taken, and not used.")
    safety_identifier: str | None = Field(None, description="Taken, and not used.")
    prompt_cache_key: str | None = Field(None, description="Taken, and not used.")
    prompt_cache_retention: str | None = Field(None, description="Taken, and not used.")
    cache_salt: str | None = Field(None, description="Taken, and not used: no cache is shared between requests.")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def continuous_usage_stats(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        return self.include_usage and bool((self.stream_options or {}).get("continuous_usage_stats"))

    @property
    def most_tokens(self) -> tuple[str, int | None]:
        """The field that limits the answer's tokens, as the client calls it, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def form(self) -> Constraint | None:
        """What the output must look like, as far as these fields say. Raises ApiError where several say it."""
        return constraint(self)

    def check(self, settings: ApiSettings) -> None:
        """What holds for chat and completions alike."""
        if self.stream_options is not None and not self.stream:
            raise bad_request(
                "stream_options is given without stream: true; leave it out, or set stream", param="stream_options"
            )
        for index, text in enumerate(self.stop or ()):
            _check_stop(index, text, settings.limits.max_stop_characters)
        name, most = self.most_tokens
        if most is not None and self.min_tokens > most:
            raise bad_request(f"min_tokens is {self.min_tokens}, and {name} is {most}; give fewer", param="min_tokens")
        check_constraint(self, settings.limits)


def _check_stop(index: int, text: str, most: int) -> None:
    if not text:
        raise bad_request("stop holds an empty string; give strings of at least one character", param="stop")
    if len(text) > most:
        raise mistakes.over_limit(f"stop[{index}]", f"has {len(text)} characters", most, "max_stop_characters")
