# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reads an answer in parts, as a client joins it, and checks on the way what holds of every part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from metrale_ray.serve.parsing.choose import make_parser
from metrale_ray.serve.parsing.pieces import OutputParser, Piece

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "now", "f")]


@dataclass
class Answer:
    """What a client has in the end. `calls`: a name and arguments each."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    has_calls: bool = False
    reasoning: str = ""
    has_cut_call: bool = field(default=False, compare=False)


def parser_of(family: str | None, reasoning: str | None = None, *, is_open: bool = False) -> OutputParser:
    """A parser for a request with `TOOLS`."""
    return make_parser(family, reasoning, TOOLS, "auto", is_open)


def read(parser: OutputParser, parts: Sequence[str]) -> Answer:
    """What the parts make together. Names come once per index, and indexes in order."""
    answer = Answer()
    for part in parts:
        _take(answer, parser.push(part))
    _take(answer, parser.flush())
    assert parser.flush() == Piece()
    answer.has_calls, answer.has_cut_call = parser.has_calls, parser.has_cut_call
    return answer


def all_cuts(text: str, num_cuts: int) -> Iterator[list[str]]:
    """`text` in one part more than `num_cuts`, in every way with no empty part; for 1 or 2 cuts."""
    for first in range(1, len(text)):
        if num_cuts == 1:
            yield [text[:first], text[first:]]
        else:
            yield from ([text[:first], text[first:second], text[second:]] for second in range(first + 1, len(text)))


def _take(answer: Answer, piece: Piece) -> None:
    answer.reasoning += piece.reasoning
    answer.content += piece.content
    indexes = [delta.index for delta in piece.calls]
    assert indexes == sorted(set(indexes))
    for delta in piece.calls:
        if delta.name is not None:
            assert delta.index == len(answer.calls)
            answer.calls.append((delta.name, delta.arguments))
        else:
            assert delta.index == len(answer.calls) - 1
            assert delta.arguments
            name, arguments = answer.calls[delta.index]
            answer.calls[delta.index] = (name, arguments + delta.arguments)
