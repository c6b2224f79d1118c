# SPDX-License-Identifier: MIT OR Apache-2.0
"""POST /v1/completions, without HTTP: from a request to an answer that is whole, or to the events of a stream.

Rules: everything is checked and prepared before anything is sent to the engine. Several prompts are one call: each
gets n answers, at the places prompt * n + answer, and what is wrong with one prompt refuses all.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from metrale_ray.errors import EngineDead, MetraleError, RequestError
from metrale_ray.serve.failures import of_error
from metrale_ray.serve.openai.call import Call
from metrale_ray.serve.openai.completion_answer import CompletionWork, whole_completion
from metrale_ray.serve.openai.completion_choice import CompletionShape
from metrale_ray.serve.openai.completion_chunks import CompletionChunks
from metrale_ray.serve.openai.completion_request import CompletionRequest, completion_prompts
from metrale_ray.serve.openai.generation import Generation
from metrale_ray.serve.openai.lead import Lead, echoing
from metrale_ray.serve.openai.pace import Pace
from metrale_ray.serve.openai.parameters import completion_params, told_to
from metrale_ray.serve.openai.preparing import prepared
from metrale_ray.serve.openai.stream import streamed
from metrale_ray.serve.prompts import CHARACTERS_PER_TOKEN, Prompt, PromptRequest
from metrale_ray.serve.text_threads import in_text_thread


@dataclass(frozen=True, slots=True)
class StartedCompletion:
    """A completion that is checked and prepared. It is asked once, for one of the two."""

    work: CompletionWork

    async def whole(self) -> dict[str, Any]:
        """OpenAI's object. Raises ApiError. Cancelling it aborts the work."""
        return await whole_completion(self.work)

    def chunks(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events. Raises ApiError before the first. Closing it aborts the work."""
        return streamed(self.work.generation, CompletionChunks(self.work))


async def start_completion(call: Call, request: CompletionRequest) -> StartedCompletion:
    """Check and prepare one call. Raises ApiError."""
    try:
        return StartedCompletion(await _work(call, request))
    except RequestError as error:
        raise told_to(request, error) from error
    except EngineDead as error:
        raise of_error(await call.model.backend.explain(error)) from error
    except MetraleError as error:
        raise of_error(error) from error


async def _work(call: Call, request: CompletionRequest) -> CompletionWork:
    front = call.model.backend.front()
    params = completion_params(request, call.model)
    prompts: Sequence[Prompt] = completion_prompts(request, call.settings)
    if not request.add_special_tokens:
        given, size = prompts, sum(map(len, prompts))
        prompts = await in_text_thread(size, lambda: _without_special_tokens(call, given))
    requests = await prepared(call, front, prompts, params, request.priority)
    return CompletionWork(
        Generation(call, front, requests, None if request.form is None else request.form.param),
        await _leads(call, request, requests),
        _shape(request),
        request.n,
        call.model.tokenizer,
        {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": call.model_name,
            "system_fingerprint": None,
        },
        request.include_usage,
        request.continuous_usage_stats,
    )


def _shape(request: CompletionRequest) -> CompletionShape:
    return CompletionShape(
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        has_echo=request.echo,
        has_answer=not request.generates_nothing,
        has_token_ids=request.return_token_ids,
    )


async def _leads(call: Call, request: CompletionRequest, requests: Sequence[PromptRequest]) -> list[Lead]:
    if not request.echo:
        return [Lead(each.token_ids) for each in requests]
    is_scored = request.logprobs is not None
    pace = Pace()
    return [await echoing(each, call.model.tokenizer, pace, is_scored=is_scored) for each in requests]


def _without_special_tokens(call: Call, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """Texts as their own tokens alone. One that is far too long stays a text, which is refused without a look."""
    tokenizer, most = call.model.tokenizer, call.model.max_model_len * CHARACTERS_PER_TOKEN
    return [
        tokenizer.encode(prompt, add_special_tokens=False)
        if tokenizer is not None and isinstance(prompt, str) and prompt and len(prompt) <= most
        else prompt
        for prompt in prompts
    ]
