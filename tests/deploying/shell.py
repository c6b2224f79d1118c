# SPDX-License-Identifier: MIT OR Apache-2.0
"""The commands in a shell's text, as lists of words: as much of its grammar as scripts of a deployment use.

Known: quotes, comments, continued lines, what parts commands (`;`, `&&`, `|`, `(`, lines), redirections, assignments
before a command, and words such as `then` and `exec`. Words keep their `$NAME`. What stands within `$(...)` in quotes
is no command here, but the script after `bash -c` is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

TOKEN = re.compile(
    r"""(?P<space>[ \t]+|\\\n)
    |(?P<comment>\#[^\n]*)
    |(?P<redirection>\d*(?:>>|[<>])&?[ \t]*)
    |(?P<end>[;&|()\n]+)
    |(?P<word>(?:[^\s'"\\;&|()<>\#]|\\[^\n]|'[^']*'|"(?:[^"\\]|\\.)*"|(?<=\S)\#)+)""",
    re.DOTALL | re.VERBOSE,
)
BEFORE_A_COMMAND = ("then", "else", "elif", "do", "if", "while", "until", "!", "{", "exec", "sudo", "time", "--")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
SHELLS = ("bash", "sh")


def commands(text: str) -> Iterator[list[str]]:
    """Each command in `text`. Raises ValueError where it is no text of a shell."""
    words: list[str] = []
    is_file = False  # what follows a redirection
    for kind, token in _tokens(text):
        if kind == "redirection":
            is_file = True
        elif kind == "word" and is_file:
            is_file = False
        elif kind == "word":
            words.append(_unquoted(token))
        elif kind == "end":
            yield from _command(words)
            words, is_file = [], False
    yield from _command(words)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place = 0
    while place < len(text):
        match = TOKEN.match(text, place)
        if match is None or match.lastgroup is None:
            raise ValueError(f"no text of a shell: {text[place : place + 40]!r}")
        yield match.lastgroup, match[0]
        place = match.end()


def _unquoted(word: str) -> str:
    return "".join(shlex.split(word)) if word else word


def _command(words: list[str]) -> Iterator[list[str]]:
    while words and (words[0] in BEFORE_A_COMMAND or ASSIGNMENT.match(words[0]) or words[0].endswith("tini")):
        words = words[1:]
    if not words:
        return
    yield words
    for shell, option, script in zip(words, words[1:], words[2:], strict=False):
        if shell in SHELLS and option == "-c":
            yield from commands(script)
