# SPDX-License-Identifier: MIT OR Apache-2.0
"""Calls as Llama 3.1 and 3.2 write them: `{"name": ..., "parameters": {...}}`, several of them with `;` between.

Rules. A call stands behind `<|python_tag|>`, or is the first thing in the answer, or follows another one, where `;` may
be missing. Without the tag an answer may be JSON of its own, so there it is a call only with the name of a given tool,
and with no other keys than a call has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from metrale_ray.serve.parsing.call_object import CallObject
from metrale_ray.serve.parsing.call_text import CallText

TAG = "<|python_tag|>"
SEPARATOR = ";"


class Llama3Json(CallText):
    """`names` are those of the given tools."""

    def __init__(self, names: Set[str]) -> None:
        super().__init__(TAG)
        self._names = names
        self._is_tagged = False
        self._open("")

    def _marked(self) -> None:
        self._is_tagged = True
        super()._marked()

    def _object(self) -> CallObject:
        return CallObject(None if self._is_tagged else self._names)

    def _followers(self) -> Mapping[str, Callable[[str], None]]:
        return {SEPARATOR: self._open, "{": self._open_next}
