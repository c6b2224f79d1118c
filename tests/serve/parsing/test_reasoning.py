# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reasoning in front of an answer, and what follows it."""

from __future__ import annotations

from typing import Any

import pytest

from metrale_ray.serve.parsing.pieces import Piece
from metrale_ray.serve.parsing.plain import Plain
from metrale_ray.serve.parsing.reasoning import Reasoning
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


class Counted(str):
    """A text that counts the characters that are read or copied by what is done with it, and with what comes of it."""

    num_characters = 0

    def lstrip(self, characters: str | None = None, /) -> Counted:
        return self._seen(super().lstrip(characters))

    def __add__(self, other: str, /) -> Counted:
        return self._seen(str(self) + str(other))

    def __radd__(self, other: str) -> Counted:
        return self._seen(str(other) + str(self))

    def __getitem__(self, key: Any, /) -> Counted:
        return self._seen(super().__getitem__(key))

    def _seen(self, text: str) -> Counted:
        Counted.num_characters += len(self) + len(text)
        return Counted(text)


@pytest.mark.parametrize("is_open", [False, True])
def test_white_space_without_end_before_an_answer_takes_time_in_proportion_to_its_length(is_open: bool) -> None:
    def work(num_characters: int) -> int:
        parser, begun = Reasoning(Plain(), is_open=is_open), Counted.num_characters
        for _ in range(num_characters):
            assert parser.push(Counted(" ")) == Piece()
        return Counted.num_characters - begun

    assert 0 < work(2000) < 2.2 * work(1000)


def test_white_space_before_an_answer_without_reasoning_is_a_part_of_it() -> None:
    assert read(Reasoning(Plain()), [" ", "\n", " <t", "hi"]) == Answer(" \n <thi")
    assert read(Reasoning(Plain()), [" ", "\n", " <t", "hink>", "hi"]) == Answer(reasoning="hi")
