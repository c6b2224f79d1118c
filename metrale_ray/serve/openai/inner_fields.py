# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Known`: the known fields of objects inside a request, and `unknown_inside`, which finds the others with their place.

Rules: a place is written as in JSON's own languages, `messages[0].tool_calls[1].function.extra`. null is not given.
What holds a caller's own names, such as a schema or arguments, is not looked into. Values of a wrong kind are others'
matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Known:
    """The names of one kind of object. `inner`: of those in it, or in lists in it, that have known names too."""

    names: tuple[str, ...]
    inner: Mapping[str, Known] = field(default_factory=dict)
    more: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names that only objects of one `role` have, by role."""


_FUNCTION = Known(("name", "description", "parameters", "strict"))
_CALL = Known(("id", "type", "function", "index"), {"function": Known(("name", "arguments"))})
_PART = Known(("type", "text", "refusal"))

TOOL = Known(("type", "function"), {"function": _FUNCTION})
TOOL_CHOICE = Known(("type", "function"), {"function": Known(("name",))})
MESSAGE = Known(
    ("role", "content", "name"),
    {"content": _PART, "tool_calls": _CALL},
    {
        "assistant": (
            *("reasoning_content", "reasoning", "thinking", "refusal", "tool_calls"),
            *("function_call", "audio"),  # refused by name
            "annotations",  # what OpenAI's clients send back with an answer
        ),
        "tool": ("tool_call_id",),
    },
)
"""What `serve.messages` reads or refuses, and what clients send back of an answer."""


def unknown_inside(given: object, known: Known, place: str) -> Iterator[str]:
    """The places of the fields of `given`, an object or a list of objects, that are not in `known`."""
    if isinstance(given, list):
        for index, one in enumerate(given):
            if isinstance(one, dict):
                yield from unknown_inside(one, known, f"{place}[{index}]")
        return
    if not isinstance(given, dict):
        return
    role = given.get("role") if known.more else None
    names = known.names + known.more.get(role, ()) if isinstance(role, str) else known.names
    for name, value in given.items():
        if value is None:
            continue
        if name not in names:
            yield f"{place}.{name}"
        elif name in known.inner and isinstance(value, list | dict):
            yield from unknown_inside(value, known.inner[name], f"{place}.{name}")
