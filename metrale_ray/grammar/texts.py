# SPDX-License-Identifier: MIT OR Apache-2.0
"""From a shape (a schema, a pattern, choices, a grammar) to the text of a grammar that the head compiles.

Rules: the text is llguidance's JSON form, a list of grammars of which the first is where an output begins. Nothing is
compiled here; a text may still turn out to make no sense.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from metrale_ray.errors import RequestError
from metrale_ray.grammar.gbnf import is_gbnf, lark_of_gbnf
from metrale_ray.grammar.library import INVALID, lark_string, llguidance

SHAPE = "shape"
LAYOUT = {"whitespace_pattern": "[ \\n\\r\\t]{1,64}"}
"""So that a model cannot write white space without end; a line break and a usual indentation fit in."""

ANY_OBJECT = '{"type":"object"}'

ANY_TEXT = "/(?s:.*)/"
SPACE = "/[ \\t\\r\\n]{1,16}/"

Part = dict[str, Any]
"""One of llguidance's grammars: {"lark_grammar": text} or {"json_schema": schema}."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A text in an output. `token_id`: the special token that it is, if it is one: its text never occurs then."""

    text: str
    token_id: int | None = None


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


def grammar_text(part: Part, after: Mark | None = None, opening: Mark | None = None) -> str:
    """The text for the head: `part` from the first token on, or behind the first `after` and white space behind it.

    With `opening` only an output that begins with this mark has `after`, and in any other one `part` begins at once.
    What begins with it is always read so, even where `part` would allow the text of the mark.
    """
    if after is None:
        return _dump([part])
    # A lazy terminal ends as soon as it is whole, before another one that could go on.
    first = "" if opening is None else f"first{_rule(opening, 'lazy', '')}"
    before = "before SPACE?" if opening is None else "(first before SPACE?)?"
    rules = [f"start: {before} @{SHAPE}", f"before{_rule(after, 'suffix', ANY_TEXT)}", first, f"SPACE: {SPACE}"]
    return _dump([{"lark_grammar": "".join(f"{rule}\n" for rule in rules if rule)}, {"name": SHAPE, **part}])


def _rule(mark: Mark, kind: str, text: str) -> str:
    """What stands behind a rule's name: the text in front of a mark, and the mark."""
    if mark.token_id is not None:
        return f": {text} <[{mark.token_id}]>"
    return f"[{kind}]: {lark_string(mark.text)}" if kind == "lazy" else f"[{kind}={lark_string(mark.text)}]: {text}"


def _dump(parts: list[Part]) -> str:
    return json.dumps({"grammars": parts}, ensure_ascii=False, separators=(",", ":"))
