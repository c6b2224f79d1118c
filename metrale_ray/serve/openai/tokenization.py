# SPDX-License-Identifier: MIT OR Apache-2.0
"""`tokenize` and `detokenize`: a model's token ids of a text or a conversation, and back, in vLLM's shapes.

Rules: a conversation goes the same way as in a chat, so that what is counted here is what is computed there. Ids that
stand for no token have no text. Long work is done off the event loop. No engine is asked. A text may be longer than a
prompt, so that its tokens can be counted, but not by much: it is work that nothing can stop.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from metrale_ray.errors import RequestError
from metrale_ray.serve.backend import ServedModel
from metrale_ray.serve.failures import bad_request
from metrale_ray.serve.messages import normal_messages_apart
from metrale_ray.serve.openai.call import Call
from metrale_ray.serve.openai.decoded import decoded
from metrale_ray.serve.openai.pace import Pace
from metrale_ray.serve.openai.tokenize_request import DetokenizeRequest, TokenizeRequest
from metrale_ray.serve.templates.tokens import all_token_ids
from metrale_ray.serve.text import Tokenizer

CHARACTERS_PER_TOKEN = 16
"""Of max_model_len: several times what a usual text has."""

LEAST_CHARACTERS = 64 * 1024
"""So much is tokenized for any model."""

TEXTS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class StartedTokens:
    """A request to a tokenizer, of which nothing runs yet. It has no stream."""

    work: Callable[[], Coroutine[Any, Any, dict[str, Any]]]

    async def whole(self) -> dict[str, Any]:
        """The answer. Raises ApiError and RequestError."""
        return await self.work()


async def tokenize(call: Call, request: TokenizeRequest) -> dict[str, Any]:
    """The token ids, and how many a prompt may have. Raises ApiError and RequestError."""
    tokenizer = _tokenizer(call.model)
    most = call.model.max_model_len
    if request.prompt is not None:
        text, special, param = request.prompt, request.add_special_tokens is not False, "prompt"
    else:
        text, special, param = await _laid_out(call, request), False, "messages"
    _check_length(text, most, param)
    token_ids = await all_token_ids(tokenizer, text, add_special_tokens=special, param=param)
    texts = await _texts(tokenizer, token_ids) if request.return_token_strs else None
    return {"count": len(token_ids), "max_model_len": most, "tokens": token_ids, "token_strs": texts}


async def detokenize(call: Call, request: DetokenizeRequest) -> dict[str, Any]:
    """The text of the ids, special tokens included. Raises ApiError."""
    return {"prompt": await decoded(request.tokens, False, _tokenizer(call.model))}


def _check_length(text: str, max_model_len: int, param: str) -> None:
    most = max(max_model_len * CHARACTERS_PER_TOKEN, LEAST_CHARACTERS)
    if len(text) > most:
        raise RequestError(
            f"the text has {len(text)} characters; at most {most} are tokenized here, which is {CHARACTERS_PER_TOKEN} "
            f"for each token of max_model_len ({max_model_len}), or {LEAST_CHARACTERS} where that is more. Shorten it, "
            f"or send it in parts.",
            code="context_length_exceeded",
            param=param,
        )


def _tokenizer(model: ServedModel) -> Tokenizer:
    if model.tokenizer is None:
        raise bad_request(f"{model.names[0]} has no tokenizer; its prompts are token ids", code="no_tokenizer")
    return model.tokenizer


async def _laid_out(call: Call, request: TokenizeRequest) -> str:
    if call.model.template is None:
        raise bad_request(
            f"{call.model.names[0]} has no chat template; give a prompt", param="messages", code="no_chat_template"
        )
    return await call.model.template.render(
        await normal_messages_apart(request.messages or [], call.settings.limits.max_messages),
        template=request.chat_template,
        tools=request.tools,
        variables=request.template_variables,
        add_generation_prompt=request.opens_answer,
        continue_final_message=request.continue_final_message,
    )


async def _texts(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    found, pace = [], Pace()
    for start in range(0, len(token_ids), TEXTS_AT_ONCE):
        found += [tokenizer.token_text(token_id) for token_id in token_ids[start : start + TEXTS_AT_ONCE]]
        await pace.did(TEXTS_AT_ONCE)
    return found
