# SPDX-License-Identifier: MIT OR Apache-2.0
"""The names of the parsers, for whoever chooses one before any is needed; `choose` has the parsers."""

from __future__ import annotations

TOOL_PARSERS = ("hermes", "llama3_json", "mistral")
OPEN_REASONING = "think_open"
"""For models whose answers begin within their reasoning, though the prompt does not show that it was opened."""
REASONING_PARSERS = ("think", OPEN_REASONING)
