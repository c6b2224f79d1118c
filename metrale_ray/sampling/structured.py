# SPDX-License-Identifier: MIT OR Apache-2.0
"""`StructuredOutputs`: what shape a request's text must have: a JSON schema, a pattern, some choices or a grammar.

Rules: exactly one shape is given; names are vLLM's. Sizes and depth are checked when the object is made, and a schema
is kept as JSON text, so whoever holds one holds something small, unchangeable and cheap to hand on.

What it leaves out: whether a pattern or a grammar makes sense, which is seen where it is compiled (`grammar`).
"""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metrale_ray.errors import RequestError
from metrale_ray.sampling import checks

MAX_SCHEMA_CHARACTERS = 2**17
"""A JSON schema or a grammar as text. Its compile time grows with it: this much takes well under a second."""

MAX_SCHEMA_DEPTH = 128
"""Containers inside containers of a schema: far above any that a person wrote."""

MAX_REGEX_CHARACTERS = 2**14
"""A pattern. Nobody writes longer ones, and each character is a node of an automaton."""

MAX_CHOICES = 1024
"""Texts of which the output is one."""

MAX_CHOICE_CHARACTERS = 4096
"""Characters of one of them."""

MAX_AFTER_CHARACTERS = 256
"""The text behind which the shape begins, and the one that opens what stands before it."""

KINDS = ("json", "json_object", "regex", "choice", "grammar")
"""The fields of which exactly one is given."""

_SHAPES = "exactly one of " + ", ".join(KINDS)


@dataclass(frozen=True, slots=True, init=False)
class StructuredOutputs:
    """The shape of one text. Every field may be given as a keyword; exactly one of the first five must be.

    json: a JSON schema, as a dict, as JSON text, or as true (any JSON value); kept as JSON text.
    json_object: true: any JSON object.
    regex: a pattern that the whole text matches: Rust's syntax, without look-around and back-references.
    choice: 1 to 1024 texts, of which the output is one.
    grammar: a grammar in Lark's syntax, or in GBNF (EBNF with `::=`).
    after: the shape begins behind the first occurrence of this text, such as the end of the reasoning, and behind white
        space that may follow it. None: at once.
    opening: with `after`: only an output that begins with this text has reasoning, and so the text `after`; in any
        other one the shape begins at once. None: every output has it.

    Raises RequestError, with `param` naming the field.
    """

    json: str | None
    json_object: bool
    regex: str | None
    choice: tuple[str, ...] | None
    grammar: str | None
    after: str | None
    opening: str | None

    def __init__(
        self,
        *,
        json: str | Mapping[str, Any] | bool | None = None,
        json_object: bool | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        after: str | None = None,
        opening: str | None = None,
    ) -> None:
        values = {
            "json": None if json is None else _schema(json),
            "json_object": _json_object(json_object),
            "regex": _text("regex", regex, MAX_REGEX_CHARACTERS),
            "choice": None if choice is None else _choices(choice),
            "grammar": _text("grammar", grammar, MAX_SCHEMA_CHARACTERS),
            "after": _text("after", after, MAX_AFTER_CHARACTERS),
            "opening": _text("opening", opening, MAX_AFTER_CHARACTERS),
        }
        given = [name for name in KINDS if values[name] not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {' and '.join(given) or 'none of these'}; allowed is {_SHAPES}",
                param="structured_outputs",
            )
        if opening is not None and after is None:
            raise RequestError("opening is given without after, which ends what it opens; give both", param="opening")
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))


def structured_outputs(value: object) -> StructuredOutputs | None:
    """`value` as StructuredOutputs; a mapping of its fields is taken too, and None. Raises RequestError."""
    if value is None or isinstance(value, StructuredOutputs):
        return value
    allowed = f"a mapping with {_SHAPES}"
    if not isinstance(value, Mapping):
        raise checks.refusal("structured_outputs", value, allowed, 'one such as {"choice": ["yes", "no"]}')
    unknown = [name for name in value if name not in (*KINDS, "after", "opening")]
    if unknown:
        raise checks.refusal("structured_outputs", unknown[0], allowed, "no other fields")
    return StructuredOutputs(**value)


def _schema(value: object) -> str:
    """A schema as compact JSON text."""
    if isinstance(value, str):
        value = _parsed(value)
    if not isinstance(value, Mapping | bool):
        raise checks.refusal("json", value, "a JSON schema: an object, true, or one of these as JSON text", "a schema")
    _check_depth(value)
    try:
        text = json_text.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"json is no JSON schema: {error}; give one of plain JSON values", param="json") from error
    return _checked_text("json", text, MAX_SCHEMA_CHARACTERS)


def _parsed(text: str) -> object:
    _checked_text("json", text, MAX_SCHEMA_CHARACTERS)
    try:
        return json_text.loads(text)
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise RequestError(f"json is no JSON text: {error}; give a JSON schema", param="json") from error


def _check_depth(value: object) -> None:
    """Level by level, not by recursion."""
    level: list[object] = [value]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [inner for each in level for inner in _inside(each)]
        if not level:
            return
    raise _too_deep()


def _inside(value: object) -> Sequence[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list | tuple) else ()


def _too_deep() -> RequestError:
    return RequestError(
        f"json is nested more than {MAX_SCHEMA_DEPTH} deep; allowed are {MAX_SCHEMA_DEPTH}; give a flatter schema",
        param="json",
    )


def _json_object(value: object) -> bool:
    return False if value is None else checks.flag("json_object", value)


def _choices(value: object) -> tuple[str, ...]:
    choices = checks.texts("choice", value, MAX_CHOICES, MAX_CHOICE_CHARACTERS)
    if not choices or isinstance(value, str):
        raise checks.refusal("choice", value, f"a list of 1 to {MAX_CHOICES} strings", "what the output may be")
    return choices


def _text(name: str, value: object, max_characters: int) -> str | None:
    return None if value is None else _checked_text(name, value, max_characters)


def _checked_text(name: str, value: object, max_characters: int) -> str:
    if not isinstance(value, str):
        raise checks.refusal(name, value, "a string", "one")
    return checks.texts(name, value, 1, max_characters)[0]
