# SPDX-License-Identifier: MIT OR Apache-2.0
"""examples/generate.py over an engine in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from examples import generate
from tests.in_process import InProcessDriver
from tests.service_rig import write_model
from tests.test_head import Process


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessDriver]:
    model = write_model(tmp_path_factory.mktemp("succ"))
    process = Process(model, 2, max_model_len=300)
    process.wait_ready()
    with InProcessDriver(process, model) as opened:
        yield opened
    process.close()


@pytest.fixture(autouse=True)
def _engine_is_played(played: InProcessDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def opened(model: str, **settings: Any) -> Iterator[InProcessDriver]:
        assert (model, settings) == ("m", {"ep_size": 2})
        yield played

    monkeypatch.setattr(generate, "LLM", opened)


def test_each_prompt_has_its_answer_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--model", "m", "--ep-size", "2", "--max-tokens", "3", "one", "two"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["'one'", "'two'"]
    assert all(len(line.partition(":")[2]) > 3 for line in lines)


def test_a_prompt_that_fails_has_its_error_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    too_long = "one two " * 1000
    assert generate.main(["--model", "m", "--ep-size", "2", too_long, "two"]) == 1
    failed, answered = capsys.readouterr().out.splitlines()
    assert "tokens" in failed.removeprefix(repr(too_long))
    assert answered.startswith("'two': '")
