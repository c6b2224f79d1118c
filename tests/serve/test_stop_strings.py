# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where a stop string ends a text, and what is held back until then."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale_ray.errors import RequestError
from metrale_ray.serve.stop_strings import StopAutomaton, StopStrings
from tests.serve.pieces import cut


def found_in(text: str, stop: Sequence[str], start: int = 0) -> tuple[str, str | None]:
    """The plain rule: the first end of any stop string behind `start`, the longest of those that end there."""
    for end in range(start + 1, len(text) + 1):
        here = [s for s in stop if text[:end].endswith(s)]
        if here:
            longest = max(here, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(deadline=None)
@given(
    text=st.text("ab你", max_size=24),
    stop=st.lists(st.text("ab你", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=12),
)
def test_a_stop_string_ends_the_text_at_the_same_place_however_it_is_cut(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    search = StopStrings(StopAutomaton(stop))
    shown, found = "", None
    for piece in cut(text, cuts):
        new, found = search.push(piece)
        shown += new
    assert (shown + search.flush(), found) == found_in(text, stop)


@settings(deadline=None)
@given(text=st.text("ab", max_size=16), stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    search = StopStrings(StopAutomaton(stop))
    shown, found = search.push(text)
    if found is None:
        held = text[len(shown) :]
        longest = max((n for n in range(len(text) + 1) for s in stop if s.startswith(text[len(text) - n :])), default=0)
        assert len(held) == longest
        assert search.flush() == held


def test_overlapping_stop_strings_are_found_where_the_first_one_ends() -> None:
    assert StopStrings(StopAutomaton(["abcd", "bc"])).push("xabcd") == ("xa", "bc")
    assert StopStrings(StopAutomaton(["abc", "bc"])).push("xabcd") == ("x", "abc")
    assert StopStrings(StopAutomaton(["ab", "abc"])).push("xabc") == ("x", "ab")
    search = StopStrings(StopAutomaton(["aab"]))
    assert [search.push(c) for c in "aaab"] == [("", None), ("", None), ("a", None), ("", "aab")]


def test_after_a_stop_string_nothing_more_is_shown() -> None:
    search = StopStrings(StopAutomaton(["STOP"]))
    assert search.push("one STOP two") == ("one ", "STOP")
    assert search.push("three") == ("", "STOP")
    assert search.flush() == ""


def test_without_stop_strings_everything_is_shown_at_once() -> None:
    assert StopStrings(StopAutomaton([])).push("text") == ("text", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="a stop string is empty") as caught:
        StopAutomaton(["a", ""])
    assert caught.value.param == "stop"


@settings(deadline=None)
@given(
    text=st.text("ab", max_size=16),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 16), max_size=8),
)
def test_with_the_stop_string_included_nothing_is_held_back(text: str, stop: list[str], cuts: list[int]) -> None:
    before, stopped_by = found_in(text, stop)
    search, shown, given_text = StopStrings(StopAutomaton(stop), included=True), "", ""
    for piece in cut(text, cuts):
        given_text += piece
        shown += search.push(piece)[0]
        assert given_text.startswith(shown)
        assert search.found is not None or shown == given_text
    assert (shown + search.flush(), search.found) == (before + (stopped_by or ""), stopped_by)


@settings(deadline=None)
@given(
    text=st.text("ab", max_size=16),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    start=st.integers(0, 16),
    cuts=st.lists(st.integers(0, 16), max_size=8),
)
def test_a_stop_string_that_is_complete_too_early_is_passed_over(
    text: str, stop: list[str], start: int, cuts: list[int]
) -> None:
    search = StopStrings(StopAutomaton(stop))
    expected, stopped_by = found_in(text, stop, start)
    shown = ""
    for piece in cut(text[:start], cuts):
        shown += search.push(piece, may_end=False)[0]
    for piece in cut(text[start:], cuts):
        shown += search.push(piece)[0]
    shown += search.flush()
    assert search.found == stopped_by
    assert shown == expected


def test_of_a_stop_string_that_was_passed_over_nothing_is_held_back() -> None:
    search = StopStrings(StopAutomaton(["ab"]))
    assert search.push("xab", may_end=False) == ("xab", None)
    assert search.push("ab") == ("", "ab")


def test_texts_that_share_an_automaton_do_not_disturb_one_another() -> None:
    automaton = StopAutomaton(["abc", "b"])
    first, second = StopStrings(automaton), StopStrings(automaton)
    assert first.push("xa") == ("x", None)
    assert second.push("ya") == ("y", None)
    assert first.push("z") == ("az", None)
    assert second.push("b") == ("a", "b")
    assert (first.found, second.found) == (None, "b")


def test_thousands_of_texts_with_the_longest_stop_strings_are_little_work_for_the_garbage_collector() -> None:
    numbers = random.Random(1)
    stop = ["".join(chr(numbers.randrange(33, 123)) for _ in range(256)) for _ in range(16)]
    gc.collect()
    before = len(gc.get_objects())
    automaton = StopAutomaton(stop)
    of_automaton = len(gc.get_objects()) - before
    searches = [StopStrings(automaton) for _ in range(1000)]
    of_searches = len(gc.get_objects()) - before - of_automaton
    assert automaton.num_states > 4000
    assert of_automaton < 20
    assert of_searches < 1020
    del automaton, searches
    assert gc.collect() == 0  # there were no cycles: everything has gone by itself
