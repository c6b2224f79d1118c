# SPDX-License-Identifier: MIT OR Apache-2.0
"""What Ray makes of a process's environment, and what it was before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from metrale_ray.cluster import environment
from metrale_ray.cluster.environment import first_environment, given_environment, runtime_env


def as_seen(monkeypatch: pytest.MonkeyPatch, actor: str | None, task: str | None) -> None:
    context = SimpleNamespace(get_actor_id=lambda: actor, get_task_id=lambda: task)
    monkeypatch.setattr(environment, "ray", SimpleNamespace(get_runtime_context=lambda: context))


def test_a_process_knows_what_it_began_with_whatever_was_set_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_SINCE", "1")
    assert "SET_SINCE" not in first_environment()
    assert first_environment()["PATH"]


def test_an_environment_that_the_system_does_not_show_is_empty(tmp_path: Path) -> None:
    assert first_environment(tmp_path) == {}
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/environ").write_bytes(b"A=1=2\0B=\0nothing\0C=\xff")
    assert first_environment(tmp_path) == {"A": "1=2", "B": "", "C": "\udcff"}


def test_only_in_actors_and_tasks_ray_has_set_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"OMP_NUM_THREADS": "1", "ONLY": "here"}
    as_seen(monkeypatch, None, None)
    assert given_environment(now) == now
    for actor, task in (("a", None), (None, "t")):
        as_seen(monkeypatch, actor, task)
        assert "ONLY" not in given_environment(now)


def test_ranks_get_listed_variables_alone() -> None:
    assert runtime_env({"HF_HOME": "/h", "HF_TOKEN": "secret"}) == {"env_vars": {"HF_HOME": "/h"}}
    assert runtime_env({"HF_TOKEN": "secret"}) is None
