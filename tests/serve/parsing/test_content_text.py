# SPDX-License-Identifier: MIT OR Apache-2.0
"""White space beside something else in a text: shown once between two parts, and not at the ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.serve.parsing.content_text import ContentText

SPACES = st.text(" \n", max_size=3)


@pytest.mark.parametrize(
    ("before", "behind", "shown"),
    [
        ("a", "b", "ab"),
        ("a \n", " b", "a \nb"),
        ("a", "\n b", "a\n b"),
        ("a ", " ", "a"),
        (" ", " b ", "b "),
        ("", "", ""),
        (" a ", "", " a"),
    ],
)
def test_an_edge_takes_the_white_space_that_stands_beside_it(before: str, behind: str, shown: str) -> None:
    for parts in ((before,), tuple(before)):
        content = ContentText()
        for part in parts:
            content.add(part)
        content.edge()
        for part in behind:
            content.add(part)
        assert content.flush() == shown


@given(st.lists(st.text("a \n", max_size=4), max_size=6))
def test_without_an_edge_all_text_is_shown_and_white_space_waits(parts: list[str]) -> None:
    content, shown = ContentText(), ""
    for part in parts:
        content.add(part)
        shown += content.drain()
        assert shown == shown.rstrip()
    assert shown + content.flush() == "".join(parts)


def test_two_edges_in_a_row_keep_the_first_white_space_for_the_text_behind_both() -> None:
    content = ContentText()
    content.add("a\n")
    content.edge()
    content.add("\n\n")
    content.edge()
    content.add(" b")
    assert content.flush() == "a\nb"
