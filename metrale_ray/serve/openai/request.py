# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Request`: the base of every request model, and the one way from a parsed body to one of them.

Rules. In this order, each before any work for the next: the body is an object; no field asks for what is not
supported; no list and no number is above the service's limits; every value is of its kind; the fields agree with one
another; where the service is strict, every field is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from metrale_ray.serve.failures import bad_request
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.openai import mistakes, unknown
from metrale_ray.serve.openai.call import ApiSettings
from metrale_ray.serve.openai.fields import Fields
from metrale_ray.serve.openai.inner_fields import Known, unknown_inside
from metrale_ray.serve.openai.unknown import Unsupported


class Request(Fields):
    """One request's body."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = unknown.NOT_ANYWHERE
    most_items: ClassVar[Mapping[str, str]] = {}
    """The names in `ServeLimits` of what bounds a list or an object, by field."""
    most_number: ClassVar[Mapping[str, str]] = {}
    """The names in `ServeLimits` of what bounds a number, by field."""
    parts: ClassVar[Mapping[str, Known]] = {}
    """The known fields of objects inside, by field."""

    def check(self, settings: ApiSettings) -> None:
        """Raise ApiError where values that are right alone are wrong together, or more than `settings` allows."""


R = TypeVar("R", bound=Request)


def parse(kind: type[R], body: object, settings: ApiSettings) -> R:
    """`body`, as a JSON parser gave it, as a request. Raises ApiError 400, naming the field."""
    if not isinstance(body, dict):
        raise bad_request(f"the body is {mistakes.shown(body)}; it must be a JSON object")
    unknown.refuse_unsupported(body, kind.unsupported)
    _check_limits(kind, body, settings.limits)
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        raise mistakes.of_validation(error) from None
    request.check(settings)
    if settings.strict:
        _check_known(request)
    return request


def unknown_fields(request: Request) -> list[str]:
    """The fields that were given and that nobody knows, those of objects inside with their place."""
    names = [name for name, value in (request.model_extra or {}).items() if value is not None]
    for part, known in request.parts.items():
        names += unknown_inside(getattr(request, part), known, part)
    return [name for name in names if name not in request.unsupported]


def ignored_fields(request: Request) -> list[str]:
    """The fields that were given and mean nothing here: those that nobody knows, and known ones without effect."""
    given = {**(request.model_extra or {}), **{part: getattr(request, part) for part in request.parts}}
    return unknown_fields(request) + unknown.ignored_names(given, request.unsupported)


def _check_known(request: Request) -> None:
    names = unknown_fields(request)
    if names:
        raise bad_request(
            f"this service takes known fields only; it does not know: {unknown.listed(names)}. Leave them out.",
            param=unknown.listed(names[:1]),
            code="unknown_field",
        )


def _check_limits(kind: type[Request], body: Mapping[str, Any], limits: ServeLimits) -> None:
    for name, limit in kind.most_items.items():
        value, most = body.get(name), getattr(limits, limit)
        if isinstance(value, list | dict) and len(value) > most:
            raise mistakes.over_limit(name, f"has {len(value)} entries", most, limit)
    for name, limit in kind.most_number.items():
        value, most = body.get(name), getattr(limits, limit)
        if isinstance(value, int) and value > most:
            raise mistakes.over_limit(name, f"is {mistakes.shown(value)}", most, limit)
