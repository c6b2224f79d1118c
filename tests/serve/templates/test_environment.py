# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a template may use, what becomes of its mistakes, and where a continued message ends. No process is started."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.serve.templates.environment import lay_out, syntax_mistake
from metrale_ray.serve.templates.outcome import MAX_REASON_CHARACTERS, Outcome
from tests.serve.templates.texts import TEMPLATES

MARK = "\ue000mark"


def text(template: str, **variables: Any) -> str:
    outcome, found = lay_out(template, variables, 1000)
    assert outcome is Outcome.TEXT, found
    return found


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if true %}\n  a\n  {% endif %}\nb\n", "  a\nb"),
        ("{{ x | tojson }}", '{"k": "<é>&\'"}'),
        ("{{ x | tojson(ensure_ascii=true, separators=(',', ':')) }}", '{"k":"<\\u00e9>&\'"}'),
        ("{{ x | tojson(indent=1) }}", '{\n "k": "<é>&\'"\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% if i > 2 %}{% break %}{% endif %}"
         "{% endfor %}", "023"),
        ("{% generation %}{% set y = 1 %}{{ x.k }}{% endgeneration %}{{ y }}", "<é>&'"),
        ("{% set n = namespace(self=1, a=2) %}{% set n.a = 3 %}{{ n.self }}{{ n.a }}", "13"),
        ("{{ dict(x, b=1) }}{{ dict.fromkeys('a') }}", "{'k': \"<é>&'\", 'b': 1}{'a': None}"),
        ("{{ nothing }}{{ nothing is defined }}", "False"),
    ],
)  # fmt: skip
def test_templates_have_what_transformers_gives_them(template: str, expected: str) -> None:
    assert text(template, x={"k": "<é>&'"}) == expected


def test_templates_know_the_day() -> None:
    before, found, after = datetime.now(), text("{{ strftime_now('%d %b %Y') }}"), datetime.now()
    assert found in {before.strftime("%d %b %Y"), after.strftime("%d %b %Y")}
    assert re.fullmatch(r"\d\d \w+ \d{4}", found)


@pytest.mark.parametrize("most", [0, 1, 9, 10, 11])
def test_the_text_has_a_limit_of_characters(most: int) -> None:
    outcome, found = lay_out("{% for i in range(5) %}éü{% endfor %}", {}, most)
    assert (outcome is Outcome.TEXT) == (most >= 10)
    assert found == ("éü" * 5 if most >= 10 else f"the text has more than {most} characters")


def test_a_reason_is_short_and_valid_text() -> None:
    outcome, reason = lay_out("{{ raise_exception('\ud800' * 5000) }}", {}, 10)
    assert outcome is Outcome.REFUSED
    assert reason == "?" * MAX_REASON_CHARACTERS + "..."
    assert lay_out("{{ raise_exception(5) }}", {}, 10) == (Outcome.REFUSED, "5")


def test_a_mistake_is_told_with_its_line() -> None:
    assert syntax_mistake("{{ 'x' * 10 ** 12 }}") is None  # nothing of it is run
    assert syntax_mistake("\n{% nothing %}") == "line 2: Encountered unknown tag 'nothing'."
    assert all(syntax_mistake(template) is None for template in TEMPLATES.values())


@given(st.text(max_size=20), st.sampled_from([("", ""), ("<", ">"), ("", " "), ("\n", "\n")]))
def test_a_continued_message_ends_where_its_content_ends(content: str, around: tuple[str, str]) -> None:
    before, behind = around
    template = "{% for m in messages %}{{ before ~ m.content ~ behind }}{% endfor %}"
    variables = {"messages": [{"content": "first"}, {"content": content}], "before": before, "behind": behind}
    expected = before + "first" + behind + before + content
    assert lay_out(template, variables, 1000, MARK) == (Outcome.TEXT, expected)
    assert variables["messages"][-1] == {"content": content}
