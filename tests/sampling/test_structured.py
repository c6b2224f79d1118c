# SPDX-License-Identifier: MIT OR Apache-2.0
"""What structured outputs may say, in which form they are kept, and what is refused by name."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from metrale_ray.errors import RequestError
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.sampling.structured import StructuredOutputs

DEEP: Any = {}
for _ in range(128):
    DEEP = {"items": DEEP}

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "structured_outputs", "none of these"),
    ({"json_object": False}, "structured_outputs", "none of these"),
    ({"regex": "a", "choice": ["a"]}, "structured_outputs", "regex and choice"),
    ({"json": "{"}, "json", "no JSON text"),
    ({"json": "[1]"}, "json", "a JSON schema"),
    ({"json": 5}, "json", "a JSON schema"),
    ({"json": {"a": {1, 2}}}, "json", "no JSON schema"),
    ({"json": {"maximum": float("nan")}}, "json", "no JSON schema"),
    ({"json": DEEP}, "json", "more than 128 deep"),
    ({"json": "[" * 100_000}, "json", "more than 128 deep"),
    ({"json": {"enum": [f"value{number}" for number in range(100_000)]}}, "json", "of 1 to 131072 characters"),
    ({"json": {"const": "\ud800"}}, "json", "valid Unicode"),
    ({"json_object": 1}, "json_object", "true or false"),
    ({"regex": ""}, "regex", "of 1 to 16384 characters"),
    ({"regex": "a" * 16_385}, "regex", "of 1 to 16384 characters"),
    ({"regex": ["a"]}, "regex", "a string"),
    ({"choice": []}, "choice", "a list of 1 to 1024"),
    ({"choice": "yes"}, "choice", "a list of 1 to 1024"),
    ({"choice": ["a", ""]}, "choice", "of 1 to 4096 characters"),
    ({"choice": ["a"] * 1025}, "choice", "at most 1024"),
    ({"grammar": "x" * 131_073}, "grammar", "of 1 to 131072 characters"),
    ({"regex": "a", "after": ""}, "after", "of 1 to 256 characters"),
    ({"regex": "a", "after": "b", "opening": ""}, "opening", "of 1 to 256 characters"),
    ({"regex": "a", "opening": "b"}, "opening", "without after"),
]


@pytest.mark.parametrize(("given", "param", "message"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_what_is_no_shape_is_refused_by_its_name(given: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputs(**given)
    assert caught.value.param == param
    assert message in caught.value.message
    assert len(caught.value.message) < 400


def test_a_schema_is_kept_as_text_however_it_was_given() -> None:
    kept = StructuredOutputs(json={"type": "object", "title": "é"})
    assert kept.json == '{"type":"object","title":"é"}'
    assert StructuredOutputs(json=' {"type": "object", "title": "\\u00e9"}') == kept
    assert [StructuredOutputs(json=value).json for value in (True, False, "true", {})] == [
        "true",
        "false",
        "true",
        "{}",
    ]
    assert {kept: 1}[pickle.loads(pickle.dumps(kept))] == 1


def test_the_kind_is_the_field_that_is_given() -> None:
    given: list[dict[str, Any]] = [
        {"json": {}},
        {"json_object": True},
        {"regex": "a", "json_object": False},
        {"choice": ("a",)},
        {"grammar": "g", "after": "</think>"},
    ]
    kinds = [StructuredOutputs(**each).kind for each in given]
    assert kinds == ["json", "json_object", "regex", "choice", "grammar"]


def test_parameters_take_them_as_a_mapping_and_not_beside_a_grammar() -> None:
    params = SamplingParams(structured_outputs={"choice": ["a", "b"]})
    assert params.structured_outputs == StructuredOutputs(choice=["a", "b"])
    both = {"regex": "a", "after": "</think>", "opening": "<think>"}
    assert SamplingParams(structured_outputs=both).structured_outputs == StructuredOutputs(**both)  # type: ignore[arg-type]
    for wrong in ({"choices": ["a"]}, ["a"], "a"):
        with pytest.raises(RequestError, match="exactly one of") as caught:
            SamplingParams(structured_outputs=wrong)  # type: ignore[arg-type]
        assert caught.value.param == "structured_outputs"
    with pytest.raises(RequestError, match="both given"):
        SamplingParams(structured_outputs={"regex": "a"}, grammar="start: 'a'")


def test_what_is_sent_has_the_grammar_in_their_place() -> None:
    params = SamplingParams(structured_outputs={"regex": "a"})
    assert params.for_tokens(grammar="text").grammar == "text"
    assert SamplingParams(grammar="own").for_tokens().grammar == "own"


@pytest.mark.parametrize("grammar", ["", "x" * (2**18 + 1), b"start", "\ud800"])
def test_a_grammar_that_is_none_is_refused(grammar: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(grammar=grammar)
    assert caught.value.param == "grammar"
