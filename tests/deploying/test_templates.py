# SPDX-License-Identifier: MIT OR Apache-2.0
"""Any text goes through a template unchanged, or is refused."""

from __future__ import annotations

import shlex

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.deploying.templates import shell_word, yaml_string
from metrale_ray.errors import UserError


@given(st.text())
def test_any_text_reads_back_from_yaml_as_itself(text: str) -> None:
    line = yaml_string(text)
    assert "\n" not in line
    assert yaml.safe_load(f"key: {line}  # comment\nother: 1\n") == {"key": text, "other": 1}
    assert yaml.safe_load(f"[{line}, {line}]") == [text, text]


@pytest.mark.parametrize(
    "text", ["", "no", "1e3", "a: b", "- x", "#", "{{ x }}", "'", '"', "\\", "a\nb", "\u2028\x85\ufeff"]
)
def test_text_that_yaml_would_take_for_something_else_stays_text(text: str) -> None:
    assert yaml.safe_load(yaml_string(text)) == text


def test_long_text_stays_on_one_line() -> None:
    assert "\n" not in yaml_string("word " * 1000)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(UserError, match="UTF-8"):
        yaml_string("a\ud800")


def test_a_number_is_not_taken_for_text() -> None:
    with pytest.raises(TypeError, match="int"):
        yaml_string(5)  # type: ignore[arg-type]


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",))))
def test_a_shell_reads_any_text_as_one_word(text: str) -> None:
    assert shlex.split(shell_word(text)) == [text]
