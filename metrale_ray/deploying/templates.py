# SPDX-License-Identifier: MIT OR Apache-2.0
"""YAML from templates: `templates/NAME.j2` in this folder, filled with values.

Rules. A name that a template uses and nobody gave is an error. A user's text enters YAML only through `yaml_string`,
and so reads back as exactly that text. What a shell will read goes through `shell_word` first.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import yaml

from metrale_ray.errors import UserError

if TYPE_CHECKING:
    import jinja2


def render(name: str, values: Mapping[str, object]) -> str:
    """The text of the template `name` (such as `rayservice.yaml`), filled with `values`.

    Raises UserError for a text that YAML cannot hold.
    """
    return _environment().get_template(f"{name}.j2").render(values)


def yaml_string(text: str) -> str:
    """`text` as one line of YAML in double quotes, which reads back as the same text.

    Raises UserError for half of a surrogate pair, which no file in UTF-8 can hold.
    """
    if not isinstance(text, str):
        raise TypeError(f"yaml_string takes text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{text!r} cannot be written in a file: {error.reason}; give text in UTF-8") from error
    # A width without limit: PyYAML would fold long text into several lines.
    quoted: str = yaml.dump(text, default_style='"', allow_unicode=True, width=sys.maxsize)
    return quoted.rstrip("\n")


def yaml_block(text: str, indent: int) -> str:
    """`text` as a value of YAML: a block of lines below an `indent`, or in quotes where a block would not read back."""
    space = " " * indent
    block = "|-\n" + "\n".join(f"{space}{line}" if line else "" for line in text.split("\n"))
    if text.isascii() and "\n" in text and _reads_as(block, text):
        return block
    return yaml_string(text)


def _reads_as(block: str, text: str) -> bool:
    try:
        return bool(yaml.safe_load(block) == text)
    except yaml.YAMLError:
        return False


def shell_word(text: str) -> str:
    """`text` as one word of a shell's command line."""
    return shlex.quote(text)


def shell_path(path: str) -> str:
    """`path` as one word of a shell's command line; the ~ of a quoted path would stay as it is."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


@cache
def _environment() -> jinja2.Environment:
    import jinja2  # most commands never need it

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("metrale_ray.deploying"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the output is YAML; `yaml_string` is its own escape
    )
    environment.filters["yaml_string"] = yaml_string
    environment.filters["yaml_block"] = yaml_block
    environment.filters["shell_word"] = shell_word
    return environment
