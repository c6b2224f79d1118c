# SPDX-License-Identifier: MIT OR Apache-2.0
"""What request models are made of: `Fields`, their base, and the kinds of values that several of them have.

Rules. Numbers are strict: "0.7" and true are none, and none is infinite. null is the same as not given. Fields that a
model does not have are kept beside it (`unknown` lists them). A list that is wrong is refused at its first wrong item.
The JSON schema of a model says the same as the model takes, as far as a schema can.

What it leaves out: limits that the owner of a service sets (`request` looks at them first).
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from metrale_ray.sampling.checks import U32_MAX
from metrale_ray.sampling.params import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

Item = TypeVar("Item")


def nullable(schema: dict[str, Any]) -> None:
    """A field that may be left out may be null, and says so."""
    required = schema.get("required", ())
    for name, one in schema.get("properties", {}).items():
        if name not in required and {"type": "null"} not in one.get("anyOf", ()):
            told = {key: one.pop(key) for key in ("title", "description", "default") if key in one}
            inner = one.pop("anyOf", None) or [dict(one)]
            one.clear()
            one.update(told, anyOf=[*inner, {"type": "null"}])


class Fields(BaseModel):
    """An object of a request: strict values, null is not given, unknown fields are kept in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True, json_schema_extra=nullable)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


ListOf = Annotated[list[Item], Field(fail_fast=True)]
"""A list, refused at its first wrong item: one error, not one for each of a million."""

TokenId = Annotated[int, Field(ge=0, le=U32_MAX)]


def _stops(given: Any) -> Any:
    if not isinstance(given, str | list):
        raise ValueError("must be a string or a list of strings")
    return [given] if isinstance(given, str) else given


_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}

StopTexts = Annotated[
    list[str],
    Field(fail_fast=True),
    BeforeValidator(_stops),
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}]}),
]
"""One string or a list of strings; always a list here."""


def _schema_or_text(given: Any) -> Any:
    if not isinstance(given, str | dict | bool):
        raise ValueError("must be a JSON schema: an object, or its text")
    return given


SchemaOrText = Annotated[
    Any,
    AfterValidator(_schema_or_text),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "boolean"}]}),
]
"""A JSON schema as an object, or as JSON's text."""

Object = dict[str, Any]
