# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which nodes a cluster should have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.deploying.expected import ExpectedNodes, from_file, from_flag
from metrale_ray.errors import UserError

OWN: dict[str, Any] = {
    "cluster_name": "own",
    "provider": {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2", "10.0.0.3"]},
}
CLOUD: dict[str, Any] = {
    "cluster_name": "far",
    "provider": {"type": "aws"},
    "head_node_type": "head",
    "available_node_types": {"head": {}, "small": {"min_workers": 2}, "large": {"min_workers": 1, "max_workers": 9}},
}


def written(folder: Path, config: Any) -> str:
    file = folder / "cluster.yaml"
    file.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    return str(file)


def test_machines_of_ones_own_are_known_by_name_the_head_first(tmp_path: Path) -> None:
    names = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    assert from_file(written(tmp_path, OWN)) == ExpectedNodes(names, 3, "own")


def test_a_head_alone_is_a_cluster(tmp_path: Path) -> None:
    alone = {**OWN, "provider": {**OWN["provider"], "worker_ips": []}}
    assert from_file(written(tmp_path, alone)).names == ("10.0.0.1",)


def test_a_clouds_nodes_are_a_number_the_head_and_all_that_are_always_kept(tmp_path: Path) -> None:
    assert from_file(written(tmp_path, CLOUD)) == ExpectedNodes((), 4, "far")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("a: [", "which is no YAML"),
        ("just text", "no cluster YAML of Ray's: give the YAML that `ray up` was given, or --nodes"),
        ([1], "no cluster YAML"),
        ({"cluster_name": "x"}, "no cluster YAML"),
        ({**CLOUD, "head_node_type": "other"}, "no cluster YAML"),
        ({**CLOUD, "available_node_types": {"head": None}}, "no cluster YAML"),
        ({**OWN, "provider": {"worker_ips": 3}}, "no cluster YAML"),
        ({**OWN, "provider": {"head_ip": "10.0.0.1", "worker_ips": "10.0.0.2"}}, "no cluster YAML"),
        ({**OWN, "provider": {"head_ip": None, "worker_ips": []}}, "no cluster YAML"),
        ({**CLOUD, "available_node_types": {"head": {"min_workers": -3}}}, "no cluster YAML"),
        ("[" * 5000, "cannot be read"),
    ],
)
def test_a_file_that_is_something_else_is_refused_by_its_name(tmp_path: Path, config: Any, told: str) -> None:
    with pytest.raises(UserError) as raised:
        from_file(written(tmp_path, config))
    assert raised.value.message.startswith("--file is '")
    assert told in raised.value.message


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name in (str(tmp_path / "absent"), str(tmp_path / "bytes"), "~no-such-user/cluster.yaml"):
        with pytest.raises(UserError, match=r"--file is .* cannot be read"):
            from_file(name)


@pytest.mark.parametrize(
    ("text", "names", "num_nodes"),
    [("3", (), 3), ("10.0.0.1", ("10.0.0.1",), 1), ("a, b,a", ("a", "b"), 2), ("fe80::1,b", ("fe80::1", "b"), 2)],
)
def test_a_flag_gives_a_number_or_names(text: str, names: tuple[str, ...], num_nodes: int) -> None:
    assert from_flag(text) == ExpectedNodes(names, num_nodes)


@pytest.mark.parametrize("text", ["", "0", "-1", "+3", "a,,b", ","])
def test_a_flag_that_says_neither_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--nodes is"):
        from_flag(text)


@given(st.text())
def test_any_flag_gives_nodes_or_a_clear_error(text: str) -> None:
    try:
        found = from_flag(text)
    except UserError:
        return
    assert found.num_nodes == len(found.names) or not found.names
    assert found.num_nodes > 0
