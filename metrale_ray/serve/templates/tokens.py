# SPDX-License-Identifier: MIT OR Apache-2.0
"""From a laid out conversation, or any text, to token ids, without holding up the event loop.

Rules. A text that cannot fit is refused before it is encoded. A long one is encoded in a thread (`text_threads`): the
library works there without the interpreter's lock. A chat template writes all special tokens itself, so none are added
behind its back: that is where a second BOS would come from.

Leaves out: whether the ids fit the model; whoever sends them sees to it.
"""

from __future__ import annotations

from metrale_ray.errors import RequestError
from metrale_ray.serve.prompts import CHARACTERS_PER_TOKEN
from metrale_ray.serve.text import Tokenizer
from metrale_ray.serve.text_threads import in_text_thread

SHORT_CHARACTERS = 2048
"""Up to here encoding takes about 1 ms, which is little more than handing it to a thread."""


async def chat_token_ids(tokenizer: Tokenizer, text: str, max_model_len: int) -> list[int]:
    """The ids of a conversation that a template laid out. Raises RequestError."""
    return await text_token_ids(tokenizer, text, max_model_len, add_special_tokens=False, param="messages")


async def text_token_ids(
    tokenizer: Tokenizer, text: str, max_model_len: int, *, add_special_tokens: bool = True, param: str = "prompt"
) -> list[int]:
    """The ids of a prompt. Raises RequestError, which names the field `param`, for one that is too long or no Unicode,
    and "too_many_requests" when too many long ones wait.
    """
    if len(text) > max_model_len * CHARACTERS_PER_TOKEN:
        raise RequestError(
            f"the text has {len(text)} characters; a prompt has at most {max_model_len - 1} tokens, as max_model_len is"
            f" {max_model_len} and counts the answer too. Shorten it.",
            code="context_length_exceeded",
            param=param,
        )
    return await all_token_ids(tokenizer, text, add_special_tokens=add_special_tokens, param=param)


async def all_token_ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
    """The ids of a text of any length. Otherwise as `text_token_ids`."""
    try:
        if len(text) <= SHORT_CHARACTERS:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await in_text_thread(len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except RequestError as error:
        raise RequestError(error.message, code=error.code, param=param) from error
