# SPDX-License-Identifier: MIT OR Apache-2.0
"""From a request to `SamplingParams`.

Rules. A field that is not given takes the value of the model's generation_config.json, else the engine's own default.
max_tokens: a chat without it takes what generation_config.json says, else all that fits; completions take 16, as
OpenAI's. More than fits is clamped by the engine (finish_reason "length"); a prompt that leaves no room for one token
is refused when it is tokenized. max_tokens 0 asks about the prompt alone: the engine makes one token, which is not
given. best_of above n makes log probabilities, by which the best are chosen.

The output's form is what the request says (`structured`), or what the caller gives instead, where tools demand one.

What it leaves out: tokenizing, which finds out whether a prompt fits and its ids exist (`serve.prompts`; `told_to` puts
its refusals into the client's words).
"""

from __future__ import annotations

from typing import Any

from metrale_ray.errors import RequestError
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.sampling.structured import StructuredOutputs
from metrale_ray.serve.backend import GenerationDefaults, ServedModel
from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.openai import mistakes
from metrale_ray.serve.openai.chat_request import ChatRequest
from metrale_ray.serve.openai.completion_request import CompletionRequest
from metrale_ray.serve.openai.sampling_fields import SamplingFields

COMPLETION_MAX_TOKENS = 16
"""What completions generate where a request does not say: OpenAI's default."""

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_AS_THEY_ARE = (
    "min_tokens",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
)


def chat_params(
    request: ChatRequest,
    model: ServedModel,
    *,
    tool_outputs: StructuredOutputs | None = None,
    after: str | None = None,
    opening: str | None = None,
    keep_special_tokens: bool = False,
) -> SamplingParams:
    """The parameters of a chat's answers. Raises ApiError.

    `tool_outputs`: the form that a demanded call of a tool has. `after`: the text behind which the request's own form
    begins, in an answer that begins with `opening`, if that is given. `keep_special_tokens`: a parser reads them.
    """
    _, most = request.most_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _params(
        request,
        model.defaults,
        n=request.n,
        max_tokens=_at_least_one(model.defaults.max_tokens if most is None else most),
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        skip_special_tokens=request.skip_special_tokens and not keep_special_tokens,
        structured_outputs=_outputs(request, after, opening) if tool_outputs is None else tool_outputs,
    )


def completion_params(request: CompletionRequest, model: ServedModel) -> SamplingParams:
    """The parameters of each prompt's answers: `num_generated` of them. Raises ApiError.

    With echo the prompt has the log probabilities that the answer has.
    """
    chooses = request.num_generated > request.n
    echoed = request.logprobs if request.echo else None
    asked = [count for count in (request.prompt_logprobs, echoed) if count is not None]
    return _params(
        request,
        model.defaults,
        n=request.num_generated,
        max_tokens=_at_least_one(COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens),
        logprobs=0 if chooses and request.logprobs is None else request.logprobs,
        prompt_logprobs=max(asked, default=None),
        skip_special_tokens=request.skip_special_tokens,
        structured_outputs=_outputs(request),
    )


def told_to(request: SamplingFields, error: RequestError) -> ApiError:
    """A refusal of the engine or of its preparation, in the words of the request's own fields."""
    is_chat = isinstance(request, ChatRequest)
    name, _ = request.most_tokens
    names = {"max_tokens": name, "prompt_token_ids": "messages" if is_chat else "prompt"}
    if is_chat:
        names |= {"logprobs": "top_logprobs", "prompt": "messages"}
    form = request.form
    if form is not None:
        names |= dict.fromkeys(("structured_outputs", "grammar", form.option), form.param)
    return mistakes.of_refusal(error, names)


def _outputs(request: SamplingFields, after: str | None = None, opening: str | None = None) -> StructuredOutputs | None:
    form = request.form
    return None if form is None else form.outputs(after, opening)


def _params(request: SamplingFields, defaults: GenerationDefaults, **own: Any) -> SamplingParams:
    given = {name: getattr(request, name) for name in _AS_THEY_ARE}
    for name in _DEFAULTED:
        value = getattr(request, name)
        value = getattr(defaults, name) if value is None else value
        if value is not None:
            given[name] = value
    try:
        return SamplingParams(**given, **own)
    except RequestError as error:
        raise told_to(request, error) from error


def _at_least_one(max_tokens: int | None) -> int | None:
    return max_tokens or (None if max_tokens is None else 1)
