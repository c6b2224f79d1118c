# SPDX-License-Identifier: MIT OR Apache-2.0
"""`load_template`: the chat template of a checkpoint, or of a file that its owner names instead.

Rules: a template is read as text, and never run here. A file that its owner names must be a template; whether the
checkpoint's own is one is seen when it is used, as such a checkpoint still completes prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metrale_ray.errors import CheckpointError, ConfigError
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.templates.environment import syntax_mistake
from metrale_ray.serve.templates.renderer import DEFAULT, Renderer
from metrale_ray.serve.text import Tokenizer

MAX_FILE_BYTES = 2**20
"""The longest template of a known model has 20 kB."""


def load_template(tokenizer: Tokenizer | None, file: Path | None, limits: ServeLimits) -> Renderer:
    """A renderer for the model of `tokenizer`, by the template in `file` instead of the checkpoint's own if given.

    Without either it still lays out messages by templates that requests bring. Raises ConfigError for a file that
    cannot be used, CheckpointError for a checkpoint whose template is no text.
    """
    special_tokens = {} if tokenizer is None else _special_tokens(tokenizer)
    if file is not None:
        return Renderer({DEFAULT: _read(file)}, special_tokens, limits)
    return Renderer({} if tokenizer is None else _own(tokenizer), special_tokens, limits)


def _read(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {file}: {error}; give a jinja2 file in UTF-8") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"the chat template {file} has more than {MAX_FILE_BYTES} bytes; give a jinja2 file")
    if not text.strip():
        raise ConfigError(f"the chat template {file} is empty; give a jinja2 file")
    mistake = syntax_mistake(text)
    if mistake is not None:
        raise ConfigError(f"the chat template {file} is no jinja2 template: {mistake}; correct it")
    return text


def _own(tokenizer: Tokenizer) -> dict[str, str]:
    given = tokenizer.inner.chat_template
    named = given if isinstance(given, Mapping) else {} if not given else {DEFAULT: given}
    for name, text in named.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise CheckpointError(
                f"the checkpoint's chat template {name!r} is of type {type(text).__name__}; it must be a text. "
                "Correct it, or use --chat-template FILE"
            )
    return dict(named)


def _special_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    """As a template sees them: `bos_token` and its text, and so on."""
    return {
        name: [str(one) for one in value] if isinstance(value, list | tuple) else str(value)
        for name, value in tokenizer.inner.special_tokens_map.items()
    }
