# SPDX-License-Identifier: MIT OR Apache-2.0
"""`check_text`: whether the text of a grammar makes sense, asked before it is sent anywhere. It needs no tokenizer."""

from __future__ import annotations

import json

from metrale_ray.grammar.deep_stack import with_deep_stack
from metrale_ray.grammar.library import invalid, llguidance, parser_limits

MAX_PARTS = 8
"""Grammars of one text that refer to each other. Two are made here; each costs time by itself."""


def check_text(text: str) -> None:
    """Raise RequestError with the code "invalid_grammar" for a text that makes no sense or costs too much.

    In any thread, without holding Python's lock for long. There is no way to stop it: whoever takes texts from
    strangers calls it in a process that can be ended.
    """
    check_parts(text)
    library = llguidance()
    is_error, messages = with_deep_stack(
        lambda: library.LLMatcher.validate_grammar_with_warnings(text, None, limits=parser_limits())
    )
    if is_error:
        raise invalid(messages[0])


def check_parts(text: str) -> None:
    """Raise RequestError when the text, if it is of the JSON form, has more grammars than are allowed."""
    if not text.lstrip().startswith("{"):
        return
    try:
        parts = json.loads(text).get("grammars")
    except (ValueError, RecursionError) as error:
        raise invalid(f"it is no JSON: {error}") from error
    if not isinstance(parts, list) or not 1 <= len(parts) <= MAX_PARTS:
        raise invalid(f'it has no list "grammars" of 1 to {MAX_PARTS}')
