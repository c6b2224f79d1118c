# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where the chat template of a service comes from."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from metrale_ray.errors import CheckpointError, ConfigError
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.templates.load import MAX_FILE_BYTES, load_template
from metrale_ray.serve.text import Tokenizer
from tests.fixtures.tokenizer import write_tokenizer

LIMITS = ServeLimits()
HELLO = [{"role": "user", "content": "Hi"}]


def laid_out(tokenizer: Any, file: Path | None) -> str:
    renderer = load_template(tokenizer, file, LIMITS)
    try:
        return asyncio.run(renderer.render(HELLO))
    finally:
        renderer.close()


def test_the_checkpoints_own_template_is_used_unless_a_file_is_named(tmp_path: Path) -> None:
    tokenizer = Tokenizer(PreTrainedTokenizerFast.from_pretrained(write_tokenizer(tmp_path)), [])
    assert laid_out(tokenizer, None) == "user: Hi<|end|>assistant: "
    file = tmp_path / "mine.jinja"
    file.write_text("ä {{ messages[0].content }}{{ eos_token }}\n", encoding="utf-8")
    assert laid_out(tokenizer, file) == "ä Hi<|end|>"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"\xff", "can't decode byte"),
        (b" \n", "is empty"),
        (b"{{ 'x' }}\n{% if %}", "is no jinja2 template: line 2: Expected an expression"),
        (b"x" * (MAX_FILE_BYTES + 1), "more than 1048576 bytes"),
    ],
)
def test_a_file_that_is_no_template_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_template(None, file, LIMITS)


def named(template: Any) -> Any:
    return SimpleNamespace(inner=SimpleNamespace(chat_template=template, special_tokens_map={}))


@pytest.mark.parametrize(
    ("template", "has_template"),
    [(None, False), ("", False), ({}, False), ("x", True), ({"default": "x", "tool_use": "y"}, True)],
)
def test_a_checkpoint_has_no_template_one_or_several(template: Any, has_template: bool) -> None:
    assert load_template(named(template), None, LIMITS).has_template is has_template
    assert not load_template(None, None, LIMITS).has_template


@pytest.mark.parametrize("template", [{"default": 3}, ["x"], 5])
def test_a_template_that_is_no_text_is_refused(template: Any) -> None:
    with pytest.raises(CheckpointError, match="it must be a text"):
        load_template(named(template), None, LIMITS)
