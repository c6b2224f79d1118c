# SPDX-License-Identifier: MIT OR Apache-2.0
"""What `inspect` writes: a table for people, one JSON object for programs, and a reason where nothing can be served."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metrale_ray import cli_inspect
from metrale_ray.cli import main
from metrale_ray.model import hub
from tests.fixtures.tiny import write_tiny
from tests.model.families import odd_values


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("sparse"), "qwen3_moe", use_sliding_window=True, sliding_window=5)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("dense"), "llama")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "METRALE_LOG_LEVEL", "METRALE_EP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)


def inspect_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["inspect", "--json", *argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_object_says_what_a_sparse_model_is_and_takes(sparse: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect_json(capsys, str(sparse), "--ep-size", "3", "--memory", "1MiB", "--max-model-len", "100")
    assert found["servable"] is True
    assert found["path"] == str(sparse)
    assert (found["architecture"], found["family"]) == ("Qwen3MoeForCausalLM", "qwen3_moe")
    assert found["layers"] == {"total": 3, "dense": 0, "sparse": 3}
    assert found["heads"] == {"query": 4, "key_value": 2, "size": 16}
    assert found["experts"] == {"count": 8, "per_token": 2, "intermediate_size": 24}
    assert (found["dtype"], found["parameters"]["stored_as"].keys()) == ("float32", {"F32"})
    assert found["files"] == {"model.safetensors": found["file_bytes"]}
    assert (found["context_length"], found["max_model_len"]) == (1024, 100)
    assert found["window"] == {"size": 5, "layers": 3}
    assert found["rope"]["kind"] == "default"
    assert found["cache"] == {"bytes_per_token": 768, "block_size": 16, "block_bytes": 12288}
    assert [(rank["first_expert"], rank["num_experts"]) for rank in found["ranks"]] == [(0, 3), (3, 3), (6, 2)]
    room = 2**20 - found["ranks"][0]["weight_bytes"]
    blocks = room // 12288 - 1
    assert found["fit"] == {
        "memory_bytes": 2**20,
        "fits": True,
        "cache_blocks": blocks,
        "cache_tokens": 16 * blocks,
        "full_length_sequences": blocks // 7,
        "least_ranks": 1,
        "least_ranks_full_length": 1,
    }


def test_the_object_of_a_dense_model_has_no_experts(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect_json(capsys, str(dense), "--ep-size", "2")
    assert (found["experts"], found["window"], found["fit"]) == (None, None, None)
    assert found["layers"] == {"total": 3, "dense": 3, "sparse": 0}
    assert found["parameters"]["total"] == found["parameters"]["active_per_token"]
    assert [(rank["first_expert"], rank["num_experts"]) for rank in found["ranks"]] == [(None, 0), (None, 0)]


def test_the_files_docstring_names_every_key(sparse: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = set(re.findall(r"`(\w+)`", cli_inspect.__doc__ or ""))
    found = inspect_json(capsys, str(sparse), "--memory", "1MiB")
    inner = [found[key] for key in ("layers", "heads", "experts", "parameters", "window", "cache", "fit")]
    assert _keys(found, *inner, found["ranks"][0]) <= named


def _keys(*mappings: Mapping[str, Any]) -> set[str]:
    return {key for mapping in mappings for key in mapping}


def test_the_table_says_the_same_to_people(sparse: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(sparse), "--ep-size", "12", "--memory", "1MiB"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "architecture Qwen3MoeForCausalLM (qwen3_moe)",
        "layers 3: 3 with experts, 0 dense",
        "experts 8, 2 for each token",
        "window 5 tokens in 3 layers",
        "cache 768 B for each token, on every rank",
        "rank experts weights",
    ):
        assert line in lines
    fits = r"fits into 1 MiB of each of 12 ranks: [\d,]+ tokens of cache, \d+ sequences? of 1,024"
    assert any(re.fullmatch(fits, line) for line in lines)
    assert any(re.fullmatch(r"0 0 [\d.]+ KiB", line) for line in lines)
    assert any(re.fullmatch(r"1-7 1-7, 1 each [\d.]+ KiB", line) for line in lines)
    assert any(re.fullmatch(r"8-11 none [\d.]+ KiB", line) for line in lines)


def test_too_little_memory_is_said_with_what_is_needed(sparse: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(sparse), "--memory", "100KiB"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"not into 100 KiB of each of 1 rank: rank 0 needs [\d.]+ KiB", out)
    assert "no number of ranks" in out


def test_what_cannot_be_served_has_a_reason_and_3(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    assert main(["inspect", str(folder), "--json"]) == 3
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["servable"], found["code"], found["model"]) == (False, "checkpoint_error", str(folder))
    assert "'GPT2LMHeadModel', which is not supported" in found["reason"]
    assert err == f"error: {found['reason']}\n"
    assert main(["inspect", str(folder)]) == 3
    assert capsys.readouterr().out == ""


def test_a_hub_id_that_is_not_in_the_cache_is_not_fetched_and_what_a_start_would_do_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_download", lambda *_: pytest.fail("fetched"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert main(["inspect", "owner/model"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "'owner/model' is not in the hub's cache here" in err
    assert "a start would fetch it whole" in err


def test_a_hub_id_in_the_cache_is_looked_at_where_it_is(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--owner--model" / "snapshots" / ("c" * 40)
    shutil.copytree(dense, snapshot)
    monkeypatch.setattr(hub, "_download", lambda *_: pytest.fail("fetched"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    found = inspect_json(capsys, "owner/model", "--revision", "c" * 40)
    assert (found["model"], found["path"]) == ("owner/model", str(snapshot))


@given(data=st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_configuration_with_any_odd_values_gives_an_object_or_3_with_one_line(
    data: st.DataObject, sparse: Path, odd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((sparse / "config.json").read_text())
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=2)):
        config[key] = data.draw(odd_values.values())
    (odd / "config.json").write_text(json.dumps(config))
    for as_json in (["--json"], []):
        code = main(["inspect", str(odd), "--memory", "1MiB", *as_json])
        out, err = capsys.readouterr()
        assert (code, err.count("\n")) in ((0, 0), (3, 1))
        assert not as_json or json.loads(out)["servable"] == (code == 0)


@pytest.fixture
def odd(sparse: Path, tmp_path: Path) -> Path:
    """A folder with the weights of `sparse`, for another configuration."""
    (tmp_path / "model.safetensors").symlink_to(sparse / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: MODEL"),
        (["/no/such/folder"], "was not found"),
        (["m", "--memory", "lots"], "'lots'; it must be bytes"),
        (["m", "--ep-size", "0"], "ep_size is 0"),
        (["m", "--prompt", "a"], "unrecognized arguments: --prompt a"),
    ],
)
def test_mistakes_are_one_line_and_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
