# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reasoning in front of an answer, and what follows it."""

from __future__ import annotations

import pytest

from tests.serve.parsing.reading import Answer, all_cuts, parser_of, read

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
CALLS = [("f", "{}")]


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nhm, so\n</think>\n\nHello ", False, Answer("Hello ", reasoning="hm, so")),
        ("\n<think>a</think>b", False, Answer("b", reasoning="a")),
        ("<think>\n\n</think>\n\nHello", False, Answer("Hello")),
        ("a < b</think> c", True, Answer("c", reasoning="a < b")),
        ("<think>a</think>b", True, Answer("b", reasoning="a")),
        (" <thin", True, Answer(reasoning="<thin")),
        (" <thin", False, Answer(" <thin")),
        ("a <think>b</think>", False, Answer("a <think>b</think>")),
        ("<think>a</think>b</think><think>c", False, Answer("b</think><think>c", reasoning="a")),
        ("<think>a <think> b</think>", False, Answer(reasoning="a <think> b")),
        ("<think>a </thin", False, Answer(reasoning="a </thin")),
        ("<think>a ", False, Answer(reasoning="a")),
        ("<think>", False, Answer()),
        ("", True, Answer()),
        ("  hello", False, Answer("  hello")),
        (f"<think>{CALL}</think>\n{CALL}", False, Answer("", CALLS, True, CALL)),
        (f"x</think>so\n{CALL}", True, Answer("so", CALLS, True, "x")),
        (f"<think>{CALL}", False, Answer(reasoning=CALL)),
        (CALL, False, Answer("", CALLS, True)),
    ],
)
def test_reasoning_is_told_from_the_answer_however_the_text_is_cut(text: str, is_open: bool, expected: Answer) -> None:
    parts = [[text], list(text), *all_cuts(text, 1), *(all_cuts(text, 2) if len(text) < 40 else ())]
    for one in parts:
        assert read(parser_of("hermes", "think", is_open=is_open), one) == expected, one


def test_reasoning_comes_with_its_text_and_white_space_waits_for_what_follows() -> None:
    parser = parser_of("hermes", "think", is_open=True)
    assert [parser.push(part).reasoning for part in ("\none", " two\n", "three\n", "</think>")] == [
        "one",
        " two",
        "\nthree",
        "",
    ]
    assert parser.push("\n").content == ""
    assert parser.push("so").content == "so"
