# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which fields are refused, which are neutral, and how names are listed."""

from __future__ import annotations

from typing import Any

import pytest

from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.openai.chat_request import ChatRequest
from metrale_ray.serve.openai.completion_request import CompletionRequest
from metrale_ray.serve.openai.tokenize_request import TokenizeRequest
from metrale_ray.serve.openai.unknown import MAX_LISTED, Unsupported, ignored_names, listed, refuse_unsupported

TABLE = {
    "beam": Unsupported((False, 1.0), "Use n."),
    "inner.part": Unsupported(("",)),
    "list": Unsupported(([],)),
    "tone": Unsupported(("even",), ignored=("loud",)),
    "inner.tone": Unsupported((), ignored=(True,)),
}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"beam": False},
        {"beam": 1},
        {"beam": None},
        {"inner": {"part": ""}},
        {"inner": 5},
        {"list": []},
        {"tone": "loud"},
    ],
)
def test_what_asks_for_nothing_is_taken(body: dict[str, Any]) -> None:
    refuse_unsupported(body, TABLE)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"beam": True}, "beam"),
        ({"beam": 0}, "beam"),
        ({"beam": 2}, "beam"),
        ({"beam": "x"}, "beam"),
        ({"inner": {"part": "x"}}, "inner.part"),
        ({"list": [1]}, "list"),
        ({"tone": "shrill"}, "tone"),
        ({"inner": {"tone": 1}}, "inner.tone"),
    ],
)
def test_what_asks_for_more_is_refused_by_name(body: dict[str, Any], name: str) -> None:
    with pytest.raises(ApiError, match=f"{name} is not supported") as caught:
        refuse_unsupported(body, TABLE)
    assert (caught.value.status, caught.value.param) == (400, name)


def test_what_is_taken_without_effect_is_told_and_what_asks_for_nothing_is_not() -> None:
    assert ignored_names({"tone": "loud", "inner": {"tone": True}, "beam": False}, TABLE) == ["tone", "inner.tone"]
    assert ignored_names({"tone": "even", "inner": {"tone": None}, "n": "loud"}, TABLE) == []


def test_names_are_listed_as_a_short_plain_line() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed([]) == ""
    hostile = ["x" * 1000, "\r\nSet-Cookie: a=b", "é,\x00", "\ud800"]
    line = listed(hostile * 100)
    assert line.isascii()
    assert line.isprintable()
    assert len(line) < MAX_LISTED * 70
    assert line.endswith(f"and {400 - MAX_LISTED} more")
    assert line.count(",") == MAX_LISTED


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, TokenizeRequest])
def test_no_field_is_both_supported_and_not(kind: type[ChatRequest]) -> None:
    tops = {name for name in kind.unsupported if "." not in name}
    assert not tops & kind.model_fields.keys()
    for part, known in kind.parts.items():
        assert not {f"{part}.{name}" for name in known.names} & kind.unsupported.keys()


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, TokenizeRequest])
def test_every_limited_field_is_a_field(kind: type[ChatRequest]) -> None:
    assert {*kind.most_items, *kind.most_number, *kind.parts} <= kind.model_fields.keys()
