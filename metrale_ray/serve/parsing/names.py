# SPDX-License-Identifier: MIT OR Apache-2.0
"""The names of the parsers, for whoever chooses one before any is needed; `choose` has the parsers."""

from __future__ import annotations

TOOL_PARSERS = ("hermes", "llama3_json", "mistral")
REASONING_PARSERS = ("think",)
