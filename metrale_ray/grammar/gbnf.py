# SPDX-License-Identifier: MIT OR Apache-2.0
"""From GBNF, the EBNF with `::=` of llama.cpp and vLLM, to Lark's syntax as llguidance reads it.

Rules: piece by piece in one pass, in time proportional to the text, without recursion. Every rule stays a rule: none
becomes a terminal, whose greedy match could forbid what the grammar allows. What is no piece of GBNF is refused with
its line.

What it leaves out: whether parentheses match and repetitions make sense, which the compiler says.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from metrale_ray.errors import RequestError
from metrale_ray.grammar.library import INVALID, lark_string

_IS_GBNF = re.compile(r"^[ \t]*[A-Za-z_][\w.-]*\s*::=", re.MULTILINE)
_PIECE = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<define>[A-Za-z_][\w.-]*\s*::=)
    |(?P<name>[A-Za-z_][\w.-]*)
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<set>\[(?:[^\]\\]|\\.)*\])
    |(?P<repeat>[*+?]|\{\s*\d*\s*(?:,\s*\d*\s*)?\})
    |(?P<mark>[().|])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}
_ROOT = "root"


@dataclass(frozen=True, slots=True)
class _Piece:
    kind: str
    text: str
    start: int


def is_gbnf(text: str) -> bool:
    """Whether a grammar is written in GBNF: some line defines a rule by `::=`."""
    return _IS_GBNF.search(text) is not None


def lark_of_gbnf(text: str) -> str:
    """The grammar in Lark's syntax; its rule `root` is where an output begins. Raises RequestError."""
    pieces = list(_pieces(text))
    defined = [_defined_name(piece) for piece in pieces if piece.kind == "define"]
    numbers = {name: f"r{number}" for number, name in enumerate(dict.fromkeys(defined))}
    if len(numbers) < len(defined):
        twice = Counter(defined).most_common(1)[0][0]
        raise _refused(f"the rule {twice!r} is defined twice; join both by |")
    if _ROOT not in numbers:
        raise _refused(f"no rule {_ROOT!r} is defined; an output begins there")
    if pieces[0].kind != "define":
        raise _unexpected(text, pieces[0])
    return f"start: {numbers[_ROOT]}" + "".join(_lark(text, pieces, numbers)) + "\n"


def _pieces(text: str) -> Iterator[_Piece]:
    position = 0
    while position < len(text):
        found = _PIECE.match(text, position)
        if found is None:
            raise _unexpected(text, _Piece("", text[position : position + 20], position))
        if found.lastgroup != "space":
            yield _Piece(str(found.lastgroup), found.group(), position)
        position = found.end()


def _lark(text: str, pieces: list[_Piece], numbers: dict[str, str]) -> Iterator[str]:
    """Each piece in Lark's syntax. An empty alternative, which GBNF allows, becomes an empty string."""
    is_empty = False  # nothing has come since the alternative began
    for piece in pieces:
        ends = piece.kind == "define" or piece.text in ("|", ")")
        if is_empty and ends:
            yield ' ""'
        is_empty = piece.kind == "define" or piece.text in ("|", "(")
        yield _of_piece(text, piece, numbers)
    if is_empty:
        yield ' ""'


def _of_piece(text: str, piece: _Piece, numbers: dict[str, str]) -> str:
    match piece.kind:
        case "define":
            return f"\n{numbers[_defined_name(piece)]}:"
        case "name":
            if piece.text not in numbers:
                raise _refused(f"line {_line(text, piece)} names the rule {piece.text!r}, which is not defined")
            return f" {numbers[piece.text]}"
        case "string":
            return " " + lark_string(_plain(piece.text[1:-1], text, piece))
        case "set":
            return f" /{_set(text, piece)}/"
        case "repeat":
            return "".join(piece.text.split())
    return " /(?s:.)/" if piece.text == "." else f" {piece.text}"


def _defined_name(piece: _Piece) -> str:
    return piece.text.removesuffix("::=").strip()


def _set(text: str, piece: _Piece) -> str:
    """A character class with every character by its number, so that none has a meaning of its own."""
    inner = piece.text[1:-1]
    negated, inner = ("^", inner[1:]) if inner.startswith("^") else ("", inner)
    atoms = re.findall(r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)|.", inner, re.DOTALL)
    parts = []
    for index, atom in enumerate(atoms):
        is_range = atom == "-" and 0 < index < len(atoms) - 1
        parts.append("-" if is_range else f"\\x{{{ord(_plain(atom, text, piece)):x}}}")
    if not parts:
        raise _refused(f"line {_line(text, piece)} has the empty character set {piece.text}")
    return f"[{negated}{''.join(parts)}]"


def _plain(inner: str, text: str, piece: _Piece) -> str:
    """A string's characters without escapes."""

    def of_escape(found: re.Match[str]) -> str:
        *numbers, character = found.groups()
        number = next((each for each in numbers if each), None)
        if number is None:
            return _NAMED.get(character, character)
        code = int(number, 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise _refused(f"line {_line(text, piece)} has {found.group()}, which is no character")
        return chr(code)

    return _ESCAPE.sub(of_escape, inner)


def _line(text: str, piece: _Piece) -> int:
    return text.count("\n", 0, piece.start) + 1


def _unexpected(text: str, piece: _Piece) -> RequestError:
    return _refused(f"line {_line(text, piece)} has {piece.text!r}, which is no part of a grammar with ::=")


def _refused(what: str) -> RequestError:
    return RequestError(f"the grammar is refused: {what}", code=INVALID, param="grammar")
