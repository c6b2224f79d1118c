# SPDX-License-Identifier: MIT OR Apache-2.0
"""The prompts of one command line: from flags or from a file, each a text or a list of token ids.

Rules: prompts come from one place only, and keep their order. A bad line is refused with its number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metrale_ray.errors import UserError
from metrale_ray.sampling.params import U32_MAX

Prompt = str | list[int]
SOURCES = ("prompt", "prompt_token_ids", "prompts_file")
LINE_KEYS = ("prompt", "prompt_token_ids")


def read_prompts(given: Mapping[str, Any]) -> list[Prompt]:
    """The prompts that the flags name, at least one. Raises UserError."""
    sources = [source for source in SOURCES if source in given]
    if len(sources) != 1:
        problem = "no prompt given" if not sources else f"{' and '.join(map(_flag, sources))} are given together"
        raise UserError(f"{problem}; use one of {', '.join(map(_flag, SOURCES))}")
    prompts = _read_file(given["prompts_file"]) if sources == ["prompts_file"] else given[sources[0]]
    if given.get("chat"):
        _check_texts(prompts)
    return list(prompts)


def _flag(source: str) -> str:
    return "--" + source.replace("_", "-")


def _read_file(path: str) -> list[Prompt]:
    try:
        # Not splitlines: JSON may hold characters that it takes for ends of lines.
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UserError(f"cannot read the prompts file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"the prompts file {path} is not UTF-8 text: {error}") from error
    prompts = [_parse_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise UserError(f'the prompts file {path} is empty; write one {{"prompt": "..."}} in each line')
    return prompts


def _parse_line(line: str, place: str) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {error}") from error
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in LINE_KEYS:
        raise UserError(f'{place} must be {{"prompt": "..."}} or {{"prompt_token_ids": [...]}}, not {line[:80]!r}')
    ((key, prompt),) = value.items()
    if key == "prompt" and not isinstance(prompt, str):
        raise UserError(f'{place}: "prompt" is {str(prompt)[:80]!r}; it must be a text')
    if key == "prompt_token_ids" and not _are_token_ids(prompt):
        raise UserError(
            f'{place}: "prompt_token_ids" is {str(prompt)[:80]!r}; it must be a list of token ids, [1, 2, 3]'
        )
    checked: Prompt = prompt
    return checked


def _are_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_token_id, value))


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= U32_MAX


def _check_texts(prompts: list[Prompt]) -> None:
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise UserError(
            "--chat needs prompts that are texts; token ids go to the model as they are, so leave --chat out"
        )
