# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which parser reads an answer: by the names of the families, and by what the request says of tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Literal

from metrale_ray.errors import ConfigError
from metrale_ray.serve.parsing import hermes, reasoning
from metrale_ray.serve.parsing.hermes import Hermes
from metrale_ray.serve.parsing.llama3_json import Llama3Json
from metrale_ray.serve.parsing.mistral import Mistral
from metrale_ray.serve.parsing.names import OPEN_REASONING, REASONING_PARSERS, TOOL_PARSERS
from metrale_ray.serve.parsing.pieces import OutputParser
from metrale_ray.serve.parsing.plain import Plain
from metrale_ray.serve.parsing.reasoning import Reasoning
from metrale_ray.serve.text import Tokenizer

Place = Literal["open", "closed", "undecided"]
"""Where an answer begins, seen from its reasoning."""

ToolChoice = str | Mapping[str, Any] | None
"""OpenAI's: "none", "auto", "required", {"type": "function", "function": {"name": ...}}; None is "auto"."""

_PARSERS: dict[str, Callable[[Set[str]], OutputParser]] = {
    "hermes": lambda names: Hermes(),
    "llama3_json": Llama3Json,
    "mistral": lambda names: Mistral(),
}
FORM_WITHOUT_PARSER = "hermes"
"""How calls are written that a grammar enforces, where the model has no form of its own."""
_WITH_SPECIAL_TOKENS = ("llama3_json", "mistral")


def make_parser(
    tool_parser: str | None,
    reasoning_parser: str | None,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: ToolChoice = None,
    starts_in_reasoning: bool = False,
) -> OutputParser:
    """What reads one answer to a request with these `tools`, which are checked ones.

    Without tools, or with tool_choice "none", everything but reasoning is content. `starts_in_reasoning`: the prompt
    opened the reasoning; see `reasoning_at`. Raises ConfigError for a name that is not in TOOL_PARSERS or
    REASONING_PARSERS.
    """
    check_parsers(tool_parser, reasoning_parser)
    form = form_of(tool_parser, tool_choice) if tools and tool_choice != "none" else None
    inner = Plain() if form is None else _PARSERS[form]({tool["function"]["name"] for tool in tools})
    return inner if reasoning_parser is None else Reasoning(inner, is_open=starts_in_reasoning)


def check_parsers(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Raises ConfigError for names of parsers that there are not."""
    for what, name, names in (
        ("tool parser", tool_parser, TOOL_PARSERS),
        ("reasoning parser", reasoning_parser, REASONING_PARSERS),
    ):
        if name is not None and name not in names:
            raise ConfigError(f"there is no {what} {name!r}; use {' or '.join(names)}, or leave it out")


def form_of(tool_parser: str | None, tool_choice: ToolChoice) -> str | None:
    """The form in which calls are written: the model's own; where a call is enforced, any model has one."""
    is_enforced = tool_choice == "required" or isinstance(tool_choice, Mapping)
    return FORM_WITHOUT_PARSER if tool_parser is None and is_enforced else tool_parser


def needs_special_tokens(
    tool_parser: str | None, reasoning_parser: str | None = None, tokenizer: Tokenizer | None = None
) -> bool:
    """Whether a marker is a special token, so that special tokens must stay in the text that is parsed.

    Without the `tokenizer`: as the family's own tokenizers have it.
    """
    if tool_parser in _WITH_SPECIAL_TOKENS:
        return True
    marks: tuple[str, ...] = (hermes.BEGIN, hermes.END) if tool_parser == "hermes" else ()
    marks += (reasoning.BEGIN, reasoning.END) if reasoning_parser is not None else ()
    return tokenizer is not None and any(tokenizer.special_id(mark) is not None for mark in marks)


def reasoning_at(prompt: str, reasoning_parser: str | None, *, opens_answer: bool = True) -> Place:
    """Where an answer to `prompt`, a whole rendered one, begins: within reasoning, behind it, or the model decides.

    "closed" too without a parser. `opens_answer`: the prompt ends where an answer begins, and not within one.
    """
    if reasoning_parser is None:
        return "closed"
    end = prompt.rstrip()
    if end.endswith(reasoning.BEGIN):
        return "open"
    if end.endswith(reasoning.END):
        return "closed"
    return "open" if reasoning_parser == OPEN_REASONING and opens_answer else "undecided"


def reasoning_marks(place: Place) -> tuple[str | None, str | None]:
    """The text behind which a constraint of an answer begins, and the one that opens what stands before it.

    Where the model decides, an answer without reasoning is constrained from its beginning: the end may never come.
    """
    after = None if place == "closed" else reasoning.END
    return after, reasoning.BEGIN if place == "undecided" else None
