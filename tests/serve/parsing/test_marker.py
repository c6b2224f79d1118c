# SPDX-License-Identifier: MIT OR Apache-2.0
"""A marker is found where it is, in whatever pieces the text comes, and no more is held back than must be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.serve.parsing.marker import Marker
from tests.serve.pieces import cut


@given(
    text=st.text("ab", max_size=20),
    marker=st.text("ab", min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 20), max_size=8),
)
def test_the_text_between_markers_is_what_split_gives(text: str, marker: str, cuts: list[int]) -> None:
    search, found = Marker(marker), [""]
    for part in cut(text, cuts):
        at = 0
        while at < len(part):
            before, at, is_found = search.push(part, at)
            found[-1] += before
            found += [""] if is_found else []
        assert marker.startswith(search.held)
        assert len(search.held) < len(marker)
    found[-1] += search.flush()
    assert found == text.split(marker)
    assert search.flush() == ""
