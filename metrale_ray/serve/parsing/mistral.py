# SPDX-License-Identifier: MIT OR Apache-2.0
"""Calls as Mistral's models write them: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or one by one, with
`[TOOL_CALLS]name[ARGS]{...}` or `[TOOL_CALLS]name{...}`, in which a `[CALL_ID]...` may stand behind the name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from metrale_ray.serve.parsing.call_text import CallText
from metrale_ray.serve.parsing.named_call import NamedCall, begins_name

MARKER = "[TOOL_CALLS]"


class Mistral(CallText):
    """Both forms, as each answer has them."""

    def __init__(self) -> None:
        super().__init__(MARKER)
        self._is_list = False

    def _marked(self) -> None:
        self._is_list = False
        super()._marked()

    def _open_call(self, text: str, at: int) -> int:
        if self._is_list or text[at] == "{":
            return super()._open_call(text, at)
        if text[at] == "[":
            self._is_list = True
            self._held.append(text[at])
            return at + 1
        if begins_name(text[at]):
            self._begin(NamedCall())
            return at
        return super()._open_call(text, at)

    def _followers(self) -> Mapping[str, Callable[[str], None]]:
        return {",": self._open, "]": self._close} if self._is_list else {}
