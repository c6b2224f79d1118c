# SPDX-License-Identifier: MIT OR Apache-2.0
"""From tools to the grammar, in llguidance's Lark, that makes a model call them as its parser reads it.

Rules. "required" and a named function: the answer is calls alone, each with a given name and with arguments of that
tool's schema. "auto": the model is free to call or not, and a grammar is needed only where a function is `strict`,
whose calls then follow its schema; where calls must not be parallel; or where an answer without calls has a schema of
its own, so that an answer is either. White space in calls is as models write it, without choice, so that none can be
written without end. Leaves out: whether a schema compiles (`grammar`), which tools are allowed (`serve.openai`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metrale_ray.errors import RequestError
from metrale_ray.sampling.structured import MAX_SCHEMA_CHARACTERS
from metrale_ray.serve.parsing.arguments_schema import Tools, arguments_schema, check_parameters
from metrale_ray.serve.parsing.choose import ToolChoice, form_of
from metrale_ray.serve.parsing.forms import Form, form

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT = {"type": "object"}
_ANY_TEXT = "/(?s:.*)/"
_NO_BRACKET_FIRST = r"/[ \t\r\n]*([^{ \t\r\n](?s:.*))?/"


def tool_grammar(
    tools: Tools,
    tool_choice: ToolChoice,
    tool_parser: str | None,
    parallel: bool = True,
    special_ids: Mapping[str, int] | None = None,
    answer_schema: str | None = None,
) -> str | None:
    """The grammar of an answer to a request with these `tools`, which are checked ones; None where none is needed.

    `parallel`: several calls are allowed, but for a named function, which is called once. `special_ids`: see
    `forms.special_ids`. `answer_schema`: that of an answer without calls, as JSON text of one line; only for "auto".
    Raises RequestError, with `param` such as "tools[0].function.parameters".
    """
    family = form_of(tool_parser, tool_choice)
    if not tools or tool_choice == "none" or family is None:
        return None
    check_parameters(tools)
    ids = special_ids or {}
    if tool_choice in (None, "auto"):
        rules = _Rules(form(family, ids), ids, parallel)
        if answer_schema is not None:
            return _checked(rules.either(tools, answer_schema))
        is_needed = not parallel or any(_is_strict(tool) for tool in tools)
        return _checked(rules.free(tools)) if is_needed else None
    if isinstance(tool_choice, Mapping):
        name, parallel = tool_choice["function"]["name"], False
        tools = [tool for tool in tools if tool["function"]["name"] == name]
    return _checked(_Rules(form(family, ids), ids, parallel).forced(tools))


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


@dataclass(frozen=True, slots=True)
class _Rules:
    """Writes the rules of a grammar for calls in one form."""

    form: Form
    special_ids: Mapping[str, int]
    parallel: bool

    def forced(self, tools: Tools) -> str:
        """An answer of calls alone."""
        start = ["start: blocks", *self._blocks("" if self.form.starts_bare else self._literal(self.form.marker))]
        return self._grammar(start, {_name(tool): arguments_schema(tool) for tool in tools})

    def either(self, tools: Tools, answer_schema: str) -> str:
        """An answer of calls alone, or of JSON."""
        answer = "{}" if answer_schema == "true" else answer_schema
        # The marker tells them apart at once: what both begin with, a lexer takes for one of them.
        start = ["start: blocks | answer", f"answer: %json {answer}", *self._blocks(self._literal(self.form.marker))]
        return self._grammar(start, _free_schemas(tools))

    def free(self, tools: Tools) -> str:
        """An answer of text with calls in it, or without."""
        marker = json.dumps(self.form.marker)
        text = _NO_BRACKET_FIRST if self.form.starts_bare else _ANY_TEXT  # what begins like a call is one
        rules = [self._free_start(), f"TEXT: {text} & ~({_ANY_TEXT} {marker} {_ANY_TEXT})"]
        if self.form.marker in self.special_ids:
            rules.append(f"until: TEXT {self._literal(self.form.marker)}")
        else:
            rules.append(f"until[suffix={marker}]: {text}")
        return self._grammar(rules, _free_schemas(tools))

    def _blocks(self, marker: str) -> list[str]:
        blocks = self._several("block", self.form.between_blocks)
        return [f"blocks: {blocks}", f"block: {_sequence(marker, 'body')}"]

    def _free_start(self) -> str:
        if self.form.starts_bare:
            return "start: body | until body | TEXT"
        has_more = self.parallel and self.form.between_blocks is not None
        return f"start: (until body){'*' if has_more else '?'} TEXT"

    def _grammar(self, start: list[str], schemas: Mapping[str, Mapping[str, Any]]) -> str:
        """All rules, with those for a block without its marker and for the calls in it."""
        one = self.form
        calls = self._several("call", one.between_calls)
        body = f"body: {_sequence(self._literal(one.opening), calls, self._literal(one.closing))}"
        call = f"call: {' | '.join(f'call_{index}' for index in range(len(schemas)))}"
        each = [self._call(index, name, schema) for index, (name, schema) in enumerate(schemas.items())]
        return "\n".join([*start, body, call, *each, ""])

    def _call(self, index: int, name: str, schema: Mapping[str, Any]) -> str:
        one = self.form
        before = _sequence(*map(self._literal, (one.before_name, name, one.before_arguments)))
        rule = f"call_{index}: {_sequence(before, f'arguments_{index}', self._literal(one.behind_arguments))}"
        return f"{rule}\narguments_{index}: %json {json.dumps({**schema, 'x-guidance': _LAYOUT})}"

    def _several(self, one: str, between: str | None) -> str:
        if between is None or not self.parallel:
            return one
        return f"{one} ({_sequence(self._literal(between), one)})*"

    def _literal(self, text: str) -> str:
        """A text, or the special token that it is; nothing for no text."""
        if text in self.special_ids:
            return f"<[{self.special_ids[text]}]>"
        return json.dumps(text) if text else ""


def _free_schemas(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """Of the arguments of tools that are called or not: any object where a function is not strict."""
    return {_name(tool): arguments_schema(tool) if _is_strict(tool) else _ANY_OBJECT for tool in tools}


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool["function"]["name"])


def _sequence(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _checked(text: str) -> str:
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise RequestError(
            f"the schemas of the tools make a grammar of {len(text)} characters; allowed are {MAX_SCHEMA_CHARACTERS}. "
            "Give fewer tools, or smaller schemas",
            param="tools",
        )
    return text
