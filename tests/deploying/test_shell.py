# SPDX-License-Identifier: MIT OR Apache-2.0
"""The commands that `tests.deploying.shell` finds are those that a shell would run."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.deploying.shell import commands


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a b; c && d || e | f", [["a", "b"], ["c"], ["d"], ["e"], ["f"]]),
        ("a \\\n  b # c; d\ne", [["a", "b"], ["e"]]),
        ("X=1 Y='2 3' a b=c", [["a", "b=c"]]),
        ("if a; then exec b; else c; fi", [["a"], ["b"], ["c"], ["fi"]]),
        ("a 'b; c' \"d && e\"", [["a", "b; c", "d && e"]]),
        ("a > b 2>&1 c < d", [["a", "c"]]),
        ('(a "$(b)") &', [["a", "$(b)"]]),
        ("a#b c", [["a#b", "c"]]),
        ("/usr/bin/tini -- a --b", [["a", "--b"]]),
        (
            "setsid bash -c '\n  a --b\n  c\n' > d &",
            [["setsid", "bash", "-c", "\n  a --b\n  c\n"], ["a", "--b"], ["c"]],
        ),
        ("", []),
    ],
)
def test_commands_are_found(text: str, found: list[list[str]]) -> None:
    assert list(commands(text)) == found


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1), min_size=1))
def test_quoted_words_are_what_they_were(words: list[str]) -> None:
    assert list(commands(shlex.join(["a", *words]))) == [["a", *words]]


def test_an_open_quote_is_no_text_of_a_shell() -> None:
    with pytest.raises(ValueError, match="no text of a shell"):
        list(commands("a 'b"))
