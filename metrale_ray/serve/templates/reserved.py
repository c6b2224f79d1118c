# SPDX-License-Identifier: MIT OR Apache-2.0
"""`check_variables`: which names a request's chat_template_kwargs may not have, and the limits of the others.

Rules: what the service itself gives a template cannot be given by a request, nor can what transformers takes for
settings of its own, so that the same request means the same in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from metrale_ray.errors import RequestError
from metrale_ray.serve.templates.environment import GLOBALS

MAX_VARIABLES = 64
MAX_NAME_CHARACTERS = 128

RESERVED = frozenset(
    (
        *("messages", "tools", "add_generation_prompt", "continue_final_message", "conversation", "conversations"),
        *("chat_template", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        *("self", *GLOBALS),
    )
)


def check_variables(variables: Mapping[str, Any], special_tokens: Mapping[str, Any]) -> None:
    """Raises RequestError for a reserved name, a name that is none, too many, or documents that are no list of them."""
    if len(variables) > MAX_VARIABLES:
        raise _refused(f"has {len(variables)} names; at most {MAX_VARIABLES} are allowed, so leave some out")
    for name in variables:
        if not isinstance(name, str) or not name.isidentifier() or len(name) > MAX_NAME_CHARACTERS:
            raise _refused(
                f"has the name {str(name)[:MAX_NAME_CHARACTERS]!r}, which no template can read; give a name of letters,"
                f" digits and underscores, at most {MAX_NAME_CHARACTERS} characters"
            )
        if name in RESERVED or name in special_tokens:
            raise _refused(f"has {name!r}, which is reserved: it cannot be set there, so leave it out")
    _check_documents(variables.get("documents"))


def _check_documents(documents: Any) -> None:
    if documents is None:
        return
    if not isinstance(documents, Sequence) or not all(isinstance(one, Mapping) for one in documents):
        raise _refused("has documents that are no list of objects; give each as an object with title and text")


def _refused(what: str) -> RequestError:
    return RequestError(f"chat_template_kwargs {what}", param="chat_template_kwargs")
