# SPDX-License-Identifier: MIT OR Apache-2.0
"""From a shape (a schema, a pattern, choices, a grammar) to the text of a grammar that the head compiles.

Rules: the text is llguidance's JSON form, a list of grammars of which the first is where an output begins. Nothing is
compiled here; a text may still turn out to make no sense.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from metrale_ray.errors import RequestError
from metrale_ray.grammar.gbnf import is_gbnf, lark_of_gbnf
from metrale_ray.grammar.library import INVALID, lark_string, llguidance

SHAPE = "shape"
LAYOUT = {"whitespace_pattern": "[ \\n\\r\\t]{1,64}"}
"""So that a model cannot write white space without end; a line break and a usual indentation fit in."""

ANY_OBJECT = '{"type":"object"}'

Part = dict[str, Any]
"""One of llguidance's grammars: {"lark_grammar": text} or {"json_schema": schema}."""


def of_json(schema: str) -> Part:
    """Texts that are JSON of the schema, which is given as JSON text. `true` is any value.

    White space between the parts is free, up to a length; a schema may say otherwise in "x-guidance". Raises
    RequestError for `false`.
    """
    value = json.loads(schema)
    if value is False:
        raise RequestError("json is the schema false, which allows no text; give another one", code=INVALID)
    own = {} if value is True else value
    return {"json_schema": {**own, "x-guidance": own.get("x-guidance", LAYOUT)}}


def of_regex(regex: str) -> Part:
    """Texts that match the pattern from their beginning to their end. Raises RequestError without llguidance."""
    return {"lark_grammar": f"start: /{llguidance().regex_to_lark(regex)}/"}


def of_choice(choices: Sequence[str]) -> Part:
    """One of these texts."""
    texts = " | ".join(lark_string(choice) for choice in dict.fromkeys(choices))
    return {"lark_grammar": f"start: CHOICE\nCHOICE: {texts}\n"}


def of_grammar(text: str) -> Part:
    """A grammar in Lark's syntax, or in GBNF. Raises RequestError for what is no GBNF."""
    return {"lark_grammar": lark_of_gbnf(text) if is_gbnf(text) else text}


def grammar_text(part: Part, after: str | None = None, after_token_id: int | None = None) -> str:
    """The text for the head: `part` from the first token on, or behind the first occurrence of the text `after`.

    `after_token_id`: the special token that the text `after` is, if it is one: its text never occurs then.
    """
    if after is None and after_token_id is None:
        return _dump([part])
    if after_token_id is not None:
        before = f"start: before <[{after_token_id}]> @{SHAPE}\nbefore: /(?s:.*)/\n"
    else:
        before = f"start: before @{SHAPE}\nbefore[suffix={lark_string(after or '')}]: /(?s:.*)/\n"
    return _dump([{"lark_grammar": before}, {"name": SHAPE, **part}])


def _dump(parts: list[Part]) -> str:
    return json.dumps({"grammars": parts}, ensure_ascii=False, separators=(",", ":"))
