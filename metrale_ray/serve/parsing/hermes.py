# SPDX-License-Identifier: MIT OR Apache-2.0
"""Calls as Hermes 2 Pro, Qwen 2.5 and Qwen 3 write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from metrale_ray.serve.parsing.call_text import CallText

BEGIN = "<tool_call>"
END = "</tool_call>"


class Hermes(CallText):
    """Each call in a block of its own. A block with several is read too, and one whose end is missing."""

    def __init__(self) -> None:
        super().__init__(BEGIN)

    def _followers(self) -> Mapping[str, Callable[[str], None]]:
        return {END: self._close, "{": self._open_next}
