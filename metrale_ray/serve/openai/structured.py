# SPDX-License-Identifier: MIT OR Apache-2.0
"""Fields that constrain the output's form, and the one constraint that they make together.

Rules: at most one of all of them is used. `structured_outputs` is vLLM's; the `guided_` fields are its older names.
What it leaves out: whether a schema or grammar can be compiled (`serve.structured`), and what tools add to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, Protocol

from pydantic import ConfigDict, Field, with_config
from pydantic_core import to_json
from typing_extensions import TypedDict

from metrale_ray.errors import RequestError
from metrale_ray.sampling.structured import StructuredOutputs
from metrale_ray.serve.failures import ApiError, bad_request
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.openai import mistakes
from metrale_ray.serve.openai.fields import ListOf, Object, SchemaOrText

OPEN = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
"""Of the objects inside requests, which stay as the client wrote them."""

Choices = Annotated[ListOf[str], Field(min_length=1)]


@with_config(OPEN)
class JsonSchemaFormat(TypedDict):
    """The schema of a response format."""

    name: Annotated[str, Field(min_length=1, max_length=64, description="What the schema is called.")]
    schema: Annotated[Object, Field(description="The JSON schema of the answer.")]
    description: NotRequired[str | None]
    strict: NotRequired[Annotated[bool | None, Field(description="Taken; the schema always holds strictly.")]]


@with_config(OPEN)
class ResponseFormat(TypedDict):
    """OpenAI's response format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NotRequired[Annotated[JsonSchemaFormat | None, Field(description="For type json_schema.")]]


@with_config(OPEN)
class StructuredOptions(TypedDict):
    """vLLM's structured_outputs: exactly one of these."""

    json: NotRequired[Annotated[SchemaOrText | None, Field(description="A JSON schema, or its text.")]]
    json_object: NotRequired[Annotated[bool | None, Field(description="true: any JSON object.")]]
    regex: NotRequired[str | None]
    choice: NotRequired[Choices | None]
    grammar: NotRequired[Annotated[str | None, Field(description="A grammar in Lark's form, or EBNF with `::=`.")]]


class Constrained(Protocol):
    """The fields of a request that constrain its output."""

    @property
    def response_format(self) -> ResponseFormat | None: ...
    @property
    def structured_outputs(self) -> StructuredOptions | None: ...
    @property
    def guided_json(self) -> Any: ...
    @property
    def guided_regex(self) -> str | None: ...
    @property
    def guided_choice(self) -> list[str] | None: ...
    @property
    def guided_grammar(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Constraint:
    """One constraint: `option` is a name of StructuredOutputs ("json", "regex", ...); `param` is the client's field."""

    option: str
    value: Any
    param: str

    def outputs(self, after: str | None = None, opening: str | None = None) -> StructuredOutputs:
        """The constraint as the engine's front takes it; it begins behind the text `after`, where the answer begins
        with the text `opening` or none is given. Raises ApiError."""
        try:
            return StructuredOutputs(**{self.option: self.value}, after=after, opening=opening)
        except RequestError as error:
            raise mistakes.of_refusal(error, {self.option: self.param}) from error


def constraint(request: Constrained) -> Constraint | None:
    """What the output of `request` must look like, or None. Raises ApiError."""
    found = [*_of_format(request.response_format), *_of_options(request.structured_outputs), *_of_guided(request)]
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise bad_request(f"{second} cannot be used together with {first}; give one of them", param=second)
    return found[0] if found else None


def check_constraint(request: Constrained, limits: ServeLimits) -> None:
    """Raise ApiError when the constraint of `request` is none, or larger than allowed."""
    one = constraint(request)
    if one is not None:
        check_size(one.param, one.value, limits)
        one.outputs()


def check_size(param: str, value: Any, limits: ServeLimits) -> None:
    """Raise ApiError when a schema, pattern or grammar is larger than allowed."""
    size_bytes = len(value.encode("utf-8", "replace")) if isinstance(value, str) else _json_bytes(param, value)
    if size_bytes > limits.max_schema_bytes:
        raise mistakes.over_limit(param, f"has {size_bytes} bytes", limits.max_schema_bytes, "max_schema_bytes")


def _json_bytes(param: str, value: Any) -> int:
    try:
        return len(to_json(value))
    except ValueError as error:  # nested beyond what can be written, or no Unicode
        raise bad_request(f"{param} cannot be written as JSON: {str(error)[:200]}", param=param) from None


def _of_format(given: ResponseFormat | None) -> Iterator[Constraint]:
    if given is None or given["type"] == "text":
        return
    if given["type"] == "json_object":
        yield Constraint("json_object", True, "response_format")
        return
    inner = given.get("json_schema")
    if inner is None:
        raise _missing("response_format.json_schema", "as response_format.type is 'json_schema'")
    yield Constraint("json", inner["schema"], "response_format.json_schema.schema")


def _of_options(given: StructuredOptions | None) -> Iterator[Constraint]:
    if given is None:
        return
    options = {name: given.get(name) for name in StructuredOptions.__annotations__}
    asked = [name for name, value in options.items() if value is not None and not (name == "json_object" and not value)]
    if len(asked) != 1:
        known = ", ".join(options)
        raise bad_request(
            f"structured_outputs holds {len(asked)} of {known}; give exactly one", param="structured_outputs"
        )
    yield Constraint(asked[0], options[asked[0]], f"structured_outputs.{asked[0]}")


def _of_guided(request: Constrained) -> Iterator[Constraint]:
    for option in ("json", "regex", "choice", "grammar"):
        value = getattr(request, f"guided_{option}")
        if value is not None:
            yield Constraint(option, value, f"guided_{option}")


def _missing(param: str, why: str) -> ApiError:
    return bad_request(f"{param} is missing; it is required, {why}", param=param)
