# SPDX-License-Identifier: MIT OR Apache-2.0
"""GBNF in Lark's syntax: what each piece becomes, what is refused with its line, and in what time."""

from __future__ import annotations

import time

import pytest

from metrale_ray.errors import RequestError
from metrale_ray.grammar.gbnf import is_gbnf, lark_of_gbnf

CASES = {
    'root ::= "a"': 'r0: "a"',
    'root ::= "a" root | "b"': 'r0: "a" r0 | "b"',
    'root ::= ("a" | )': 'r0: ( "a" | "" )',
    "root ::= ": 'r0: ""',
    'root ::= | "a"': 'r0: "" | "a"',
    'root ::= "\\"\\n\\x41\\u00e9\\U0001F600\\\\"': 'r0: "\\"\\nAé😀\\\\"',
    "root ::= [a-z0-9_-]+": r"r0: /[\x{61}-\x{7a}\x{30}-\x{39}\x{5f}\x{2d}]/+",
    'root ::= [^"\\]/&]{1, 3}': r"r0: /[^\x{22}\x{5d}\x{2f}\x{26}]/{1,3}",
    "root ::= [-a]? .*": r"r0: /[\x{2d}\x{61}]/? /(?s:.)/*",
    "# before\nroot ::= # none\n  a-b.c \n  # between\na-b.c ::= root": "r0: r1\nr1: r0",
}


@pytest.mark.parametrize("text", CASES)
def test_each_piece_has_its_form_in_lark(text: str) -> None:
    assert is_gbnf(text)
    assert lark_of_gbnf(text) == f"start: r0\n{CASES[text]}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('a ::= "x"', "no rule 'root'"),
        ('root ::= "x"\nroot ::= "y"', "'root' is defined twice"),
        ("root ::= a\n\n  | b", "line 1 names the rule 'a'"),
        ('x root ::= "a"', "line 1 has 'x'"),
        ('root ::= "a\n', "line 1 has"),
        ("root ::= \n\n !", "line 3 has '!'"),
        ("root ::= []", "the empty character set"),
        ('root ::= "\\uD800"', "no character"),
        ('root ::= "\\UFFFFFFFF"', "no character"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        lark_of_gbnf(text)
    assert message in caught.value.message
    assert caught.value.code == "invalid_grammar"


def test_lark_is_told_apart() -> None:
    for text in ('start: "::="', 'start: a\na: "x ::= y"', "", "%json {}"):
        assert not is_gbnf(text)


@pytest.mark.parametrize(
    "text", ["\n" * 130_000, "a" * 130_000, "a\n" * 65_000, 'root ::= "' + "\\" * 130_000, "root ::= [" + "^" * 130_000]
)
def test_large_texts_take_time_in_proportion(text: str) -> None:
    started = time.process_time()
    if is_gbnf(text):
        with pytest.raises(RequestError):
            lark_of_gbnf(text)
    assert time.process_time() - started < 2  # hundredths of it, in truth; squares would be minutes
