# SPDX-License-Identifier: MIT OR Apache-2.0
"""One constraint comes of all the fields that may make one, with the client's name for it."""

from __future__ import annotations

from typing import Any

import pytest

from metrale_ray.sampling.structured import StructuredOutputs
from metrale_ray.serve.openai.structured import constraint
from tests.serve.openai.bodies import BOTH, SETTINGS, Read, refused

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def _format(**inner: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", **inner}}}


@BOTH
@pytest.mark.parametrize(
    ("more", "param", "outputs"),
    [
        (_format(schema=SCHEMA), "response_format.json_schema.schema", StructuredOutputs(json=SCHEMA)),
        ({"response_format": {"type": "json_object"}}, "response_format", StructuredOutputs(json_object=True)),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", StructuredOutputs(json=SCHEMA)),
        ({"structured_outputs": {"json": "true"}}, "structured_outputs.json", StructuredOutputs(json=True)),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", None),
        ({"structured_outputs": {"regex": "a+", "json": None}}, "structured_outputs.regex", None),
        ({"structured_outputs": {"choice": ["a", "b"], "json_object": False}}, "structured_outputs.choice", None),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs.grammar", None),
        ({"guided_json": SCHEMA}, "guided_json", StructuredOutputs(json=SCHEMA)),
        ({"guided_regex": "a+"}, "guided_regex", StructuredOutputs(regex="a+")),
        ({"guided_choice": ["a", "b"]}, "guided_choice", StructuredOutputs(choice=["a", "b"])),
        ({"guided_grammar": 'start: "a"'}, "guided_grammar", StructuredOutputs(grammar='start: "a"')),
    ],
)
def test_each_field_makes_its_constraint(
    read: Read, body: dict[str, Any], more: dict[str, Any], param: str, outputs: StructuredOutputs | None
) -> None:
    found = constraint(read(body | more, SETTINGS))
    assert found is not None
    assert found.param == param
    assert outputs is None or found.outputs() == outputs
    assert found.outputs("</think>").after == "</think>"


@BOTH
@pytest.mark.parametrize("more", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": None}])
def test_without_one_there_is_none(read: Read, body: dict[str, Any], more: dict[str, Any]) -> None:
    assert constraint(read(body | more, SETTINGS)) is None


@BOTH
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (_format(), "response_format.json_schema.schema"),
        (_format(schema=5), "response_format.json_schema.schema"),
        (_format(schema={}, name=""), "response_format.json_schema.name"),
        (_format(schema={"x": "y" * 2**16}), "response_format.json_schema.schema"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_json": float("inf")}, "guided_json"),
        ({"guided_json": {"maximum": float("inf")}}, "guided_json"),
    ],
)
def test_a_wrong_one_is_refused_with_the_clients_name(
    read: Read, body: dict[str, Any], more: dict[str, Any], param: str
) -> None:
    error = refused(read, body | more)
    assert error.param == param
    assert param.partition(".")[0] in error.message


@BOTH
def test_a_schema_nested_without_end_is_refused(read: Read, body: dict[str, Any]) -> None:
    schema: dict[str, Any] = {}
    for _ in range(1000):
        schema = {"not": schema}
    assert refused(read, body | _format(schema=schema)).param == "response_format.json_schema.schema"
