# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which token Ray is shown: one of its own for a Ray that is started, this user's for one that runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from metrale_ray.cli_token import RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, use_cluster_token, use_ray_token


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home without a token, and an environment that is put back."""
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)})
    return tmp_path


def with_token(home: Path) -> None:
    (home / ".ray").mkdir()
    (home / ".ray/auth_token").write_text("t" * 64)


@pytest.mark.parametrize("address", [None, "local"])
def test_a_ray_that_is_started_gets_a_token_of_its_own(address: str | None, home: Path) -> None:
    with_token(home)
    use_ray_token(address)
    assert os.environ[RAY_AUTH_MODE] == "token"
    assert len(os.environ[RAY_AUTH_TOKEN]) == 64


def test_a_ray_that_runs_has_its_own_rules(home: Path) -> None:
    with_token(home)
    use_ray_token("10.0.0.1:6379")
    assert RAY_AUTH_MODE not in os.environ


def test_a_command_that_looks_shows_the_token_that_this_user_has(home: Path) -> None:
    with_token(home)
    use_cluster_token()
    assert os.environ[RAY_AUTH_MODE] == "token"
    assert RAY_AUTH_TOKEN not in os.environ


@pytest.mark.parametrize("variable", [RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH])
def test_a_token_of_the_environment_is_shown_too(variable: str) -> None:
    os.environ[variable] = "x"
    use_cluster_token()
    assert os.environ[RAY_AUTH_MODE] == "token"


def test_without_a_token_nothing_is_said_of_one() -> None:
    use_cluster_token()
    assert RAY_AUTH_MODE not in os.environ


def test_a_mode_of_the_environment_is_left_alone(home: Path) -> None:
    with_token(home)
    os.environ[RAY_AUTH_MODE] = "disabled"
    use_ray_token(None)
    use_cluster_token()
    assert os.environ[RAY_AUTH_MODE] == "disabled"
    assert RAY_AUTH_TOKEN not in os.environ
