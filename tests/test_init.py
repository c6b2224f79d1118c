# SPDX-License-Identifier: MIT OR Apache-2.0
"""The public names are there, and each is the one that its home defines."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

import metrale_ray

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("LLM", "metrale_ray.llm"),
        ("AttachedLLM", "metrale_ray.attached"),
        ("attach", "metrale_ray.attached"),
        ("SamplingParams", "metrale_ray.sampling.params"),
        ("EngineConfig", "metrale_ray.config"),
        ("Logprob", "metrale_ray.serve.outputs"),
    ],
)
def test_a_public_name_is_the_one_of_its_home(name: str, home: str) -> None:
    assert getattr(metrale_ray, name) is getattr(importlib.import_module(home), name)
    assert name in dir(metrale_ray)


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="'metrale_ray' has no attribute 'Engine'"):
        _ = metrale_ray.Engine


def test_the_version_is_that_of_the_distribution() -> None:
    assert metrale_ray.__version__ == tomllib.loads(PYPROJECT.read_text())["project"]["version"]
