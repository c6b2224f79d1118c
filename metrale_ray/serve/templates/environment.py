# SPDX-License-Identifier: MIT OR Apache-2.0
"""`lay_out`: one conversation as text, by jinja2 in its immutable sandbox, set up as transformers sets it up.

Rules. A template gets plain JSON values and nothing else, so it has no object of this program in its hands. What it
gives is counted as it comes and stopped at a limit. Whatever goes wrong in a template becomes an `Outcome`.

Leaves out: limits of time and memory, which a template in C code (`10 ** 10 ** 9`) passes without coming back here;
they are those of the process that this runs in (`cell_main`). Which tokens a model generated (`{% generation %}`) is
for training: the tag is read, and its body is laid out like any other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from metrale_ray.serve.templates.outcome import MAX_REASON_CHARACTERS, Outcome

GLOBALS = ("raise_exception", "strftime_now", "dict", "namespace", "range", "lipsum", "cycler", "joiner")
"""The functions that every template may call."""

KEPT_TEMPLATES = 16
"""Compiled ones, which take about 1 ms each; a model has one or two."""


class Refused(TemplateError):
    """A template called raise_exception."""


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`: its body, with a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """The body's nodes."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class PlainDict:
    """`dict` of a template: makes dictionaries, and is no type whose attributes lead anywhere."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """A dictionary with one value for all keys."""
        return dict.fromkeys(keys, value)


class PlainNamespace(Namespace):
    """`namespace` of a template, without names that Python itself would look up."""

    def __init__(*args: Any, **values: Any) -> None:  # so that a template may name a value `self`
        self, *given = args
        attributes = dict(*given, **values)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def lay_out(
    template: str, variables: Mapping[str, Any], max_characters: int, continue_at: str | None = None
) -> tuple[Outcome, str]:
    """The text, or why there is none. `variables` are the template's, `messages` among them.

    `continue_at`: a mark that stands for no text. The text ends where the content of the last message ends, which is
    found by putting the mark behind it.
    """
    try:
        if continue_at is None:
            return Outcome.TEXT, _text(template, variables, max_characters)
        return _until_last_content(template, variables, max_characters, continue_at)
    except Refused as error:
        return Outcome.REFUSED, _reason(error.message or "")
    except TemplateSyntaxError as error:
        return Outcome.UNREADABLE, _mistake(error)
    except _TooLong:
        return Outcome.TOO_LONG, f"the text has more than {max_characters} characters"
    except MemoryError:
        return Outcome.NO_MEMORY, "it needs more memory than it is given"
    except Exception as error:  # noqa: BLE001  # a template can raise anything that Python can
        return Outcome.FAILED, _reason(f"{type(error).__name__}: {error}")


def syntax_mistake(template: str) -> str | None:
    """Why `template` is none, or None when it is one. Parses it and runs nothing of it."""
    try:
        _environment().parse(template)
    except TemplateSyntaxError as error:
        return _mistake(error)
    return None


class _TooLong(Exception):
    pass


def _text(template: str, variables: Mapping[str, Any], max_characters: int) -> str:
    parts, room = [], max_characters
    for part in _compiled(template).generate(variables):
        room -= len(part)
        if room < 0:
            raise _TooLong
        parts.append(part)
    return "".join(parts)


def _until_last_content(
    template: str, variables: Mapping[str, Any], max_characters: int, mark: str
) -> tuple[Outcome, str]:
    messages = list(variables["messages"])
    content = messages[-1]["content"]
    # A template that trims the content takes the space too, and shows by that that it does.
    messages[-1] = {**messages[-1], "content": f"{content}{mark} "}
    text = _text(template, {**variables, "messages": messages}, max_characters + len(mark) + 1)
    before, found, behind = text.rpartition(mark)
    if not found or content.strip() not in before:
        return Outcome.FAILED, "the template does not show the content of the last message, so it cannot be continued"
    return Outcome.TEXT, before if behind.startswith(" ") else before.rstrip()


@lru_cache(KEPT_TEMPLATES)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=PlainDict(), namespace=PlainNamespace
    )
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models have seen it, without the escapes for HTML that jinja2's own filter writes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise Refused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"{name!r} cannot be kept in a namespace: its name begins with an underscore")


def _mistake(error: TemplateSyntaxError) -> str:
    return _reason(f"line {error.lineno}: {error.message}")


def _reason(text: str) -> str:
    """In so few characters that any message can be shown, and all of them valid ones."""
    short = text if len(text) <= MAX_REASON_CHARACTERS else text[:MAX_REASON_CHARACTERS] + "..."
    return short.encode("utf-8", "replace").decode()
