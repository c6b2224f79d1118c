# SPDX-License-Identifier: MIT OR Apache-2.0
"""Events come out whole, however their bytes were cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.traffic import events
from metrale_ray.traffic.events import EventReader, EventTooLong

STREAM = b": a comment\n\nevent: x\ndata: one\n\ndata:two\r\n\r\ndata: a\ndata: b\nid: 4\n\n\n\ndata: [DONE]\n\n"
DATA = [b"one", b"two", b"a\nb", b"[DONE]"]


def read(pieces: list[bytes]) -> list[bytes]:
    reader = EventReader()
    return [data for piece in pieces for data in reader.feed(piece)]


def test_every_cut_in_two_gives_the_same_events() -> None:
    for cut in range(len(STREAM) + 1):
        assert read([STREAM[:cut], STREAM[cut:]]) == DATA


@given(st.lists(st.integers(0, len(STREAM)), max_size=12).map(sorted))
def test_any_cuts_give_the_same_events(cuts: list[int]) -> None:
    bounds = [0, *cuts, len(STREAM)]
    assert read([STREAM[low:high] for low, high in itertools.pairwise(bounds)]) == DATA


def test_an_event_is_given_with_its_last_byte_and_not_before() -> None:
    reader = EventReader()
    assert list(reader.feed(b"data: one\n")) == []
    assert list(reader.feed(b"\n")) == [b"one"]


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_EVENT_BYTES", 10)
    reader = EventReader()
    assert list(reader.feed(b"data: 1234")) == []
    with pytest.raises(EventTooLong):
        list(reader.feed(b"5"))
