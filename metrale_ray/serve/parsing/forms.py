# SPDX-License-Identifier: MIT OR Apache-2.0
"""How a call of a tool is written in each family's form, where a grammar writes it: so that its parser reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from metrale_ray.serve.parsing import hermes, llama3_json, mistral, named_call
from metrale_ray.serve.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Form:
    """A block of calls stands behind `marker`: its opening, then calls with `between_calls`, then its closing.

    A call: `before_name`, the name, `before_arguments`, the arguments as JSON, `behind_arguments`. `between_calls` is
    None where a block has one call, `between_blocks` where there is one block. `starts_bare`: a block may be the first
    thing in an answer without its marker; then nothing follows a block.
    """

    marker: str
    opening: str
    before_name: str
    before_arguments: str
    behind_arguments: str
    closing: str
    between_calls: str | None
    between_blocks: str | None
    starts_bare: bool = False


_HERMES = Form(
    marker=hermes.BEGIN,
    opening="\n",
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    behind_arguments="}",
    closing="\n" + hermes.END,
    between_calls=None,
    between_blocks="\n",
)
_LLAMA3_JSON = Form(
    marker=llama3_json.TAG,
    opening="",
    before_name='{"name": "',
    before_arguments='", "parameters": ',
    behind_arguments="}",
    closing="",
    between_calls=llama3_json.SEPARATOR + " ",
    between_blocks=None,
    starts_bare=True,
)
_MISTRAL = Form(
    marker=mistral.MARKER,
    opening=" [",
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    behind_arguments="}",
    closing="]",
    between_calls=", ",
    between_blocks=None,
)
_MISTRAL_NAMED = Form(
    marker=mistral.MARKER,
    opening="",
    before_name="",
    before_arguments=named_call.ARGUMENTS,
    behind_arguments="",
    closing="",
    between_calls=None,
    between_blocks="",
)
_FORMS = {"hermes": _HERMES, "llama3_json": _LLAMA3_JSON, "mistral": _MISTRAL}
_SPECIAL = {
    "hermes": (hermes.BEGIN,),
    "llama3_json": (llama3_json.TAG,),
    "mistral": (mistral.MARKER, named_call.ARGUMENTS),
}


def special_ids(name: str | None, tokenizer: Tokenizer | None) -> dict[str, int]:
    """The texts in calls of the family `name` that are special tokens of this tokenizer, with their ids."""
    if name is None or tokenizer is None:
        return {}
    found = {text: tokenizer.special_id(text) for text in _SPECIAL.get(name, ())}
    return {text: token_id for text, token_id in found.items() if token_id is not None}


def form(name: str, ids: Mapping[str, int]) -> Form:
    """The form of a family, where the tokenizer has the special tokens `ids`: a newer Mistral has one for arguments."""
    is_named = name == "mistral" and named_call.ARGUMENTS in ids
    return _MISTRAL_NAMED if is_named else _FORMS[name]
