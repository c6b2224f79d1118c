# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whole batches with an engine of two ranks: answers, errors in their lines, going on, and ends that come early."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.batch import BatchOptions, run_batch
from tests.batch.rig import NAME, RigEngine, by_id, completion, rig_engine, write_lines
from tests.service_rig import write_model

OPTIONS = BatchOptions(served_model_name=NAME, concurrency=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("succ"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RigEngine]:
    with rig_engine(model) as engine:
        yield engine


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


Files = tuple[Path, Path]


def text_of(line: dict[str, Any]) -> Any:
    (choice,) = line["response"]["body"]["choices"]
    return choice["token_ids"]


def test_each_request_has_one_line_with_its_answer(engine: RigEngine, files: Files) -> None:
    requests = [completion(f"id-{n}", first=n, return_token_ids=True) for n in range(1, 31)]
    summary = run_batch(engine, write_lines(files[0], requests), files[1], OPTIONS)
    lines = by_id(files[1])
    assert lines.keys() == {f"id-{n}" for n in range(1, 31)}
    assert all(text_of(lines[f"id-{n}"]) == list(range(n + 1, n + 5)) for n in range(1, 31))
    assert {line["response"]["status_code"] for line in lines.values()} == {200}
    assert {line["error"] for line in lines.values()} == {None}
    assert len({line["id"] for line in lines.values()}) == 30
    assert all(line["id"].startswith("batch_req_") for line in lines.values())
    assert (summary.num_requests, summary.num_errors, summary.num_before) == (30, 0, 0)
    assert (summary.num_prompt_tokens, summary.num_tokens) == (30, 120)
