# SPDX-License-Identifier: MIT OR Apache-2.0
"""A cluster's judgement: what differs, who does not answer, and who reaches whom."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from metrale_ray.cluster.endings import version_mismatch
from metrale_ray.doctor.cluster_rules import judge
from metrale_ray.doctor.facts import ClusterFacts, NodeFacts
from metrale_ray.doctor.finding import Finding, has_problem
from tests.doctor.test_node_rules import GOOD, VERSIONS

H200 = {"gpus": ["NVIDIA H200, 143771 MiB, 570.1"], "torch_cuda": "12.8", "ray_gpus": 1.0}


def node(name: str, **changes: Any) -> NodeFacts:
    return dataclasses.replace(GOOD, name=name, **changes)


def cluster(*nodes: NodeFacts, **changes: Any) -> ClusterFacts:
    known: dict[str, Any] = {"address": "10.0.0.1:6379", "driver": node("this process"), "num_connections": 2}
    return ClusterFacts(nodes, **{**known, **changes})


def bad(facts: ClusterFacts) -> list[Finding]:
    return [finding for finding in judge(facts) if finding.level != "ok"]


def only(facts: ClusterFacts) -> Finding:
    found = bad(facts)
    assert len(found) == 1, found
    return found[0]


def test_nodes_that_are_alike_and_reach_each_other_have_no_problem() -> None:
    findings = judge(cluster(node("n1"), node("n2")))
    assert not has_problem(findings)
    assert findings[0].text == "10.0.0.1:6379 has the nodes n1, n2"
    assert any(f.text == "every node reaches every other (2 connections)" for f in findings)


def test_this_machine_alone_is_judged_as_one_and_it_is_said() -> None:
    findings = judge(ClusterFacts((node("this machine"),)))
    assert "only this machine was checked" in findings[0].text
    assert {finding.node for finding in findings[1:]} == {"this machine"}


def test_without_a_ray_at_the_address_the_machine_is_judged_all_the_same() -> None:
    facts = ClusterFacts((), "10.0.0.9:1", node("this process", open_files=100), cluster_error="Connection refused")
    problems = bad(facts)
    assert problems[0].text == "no Ray at 10.0.0.9:1: Connection refused"
    assert [problem.subject for problem in problems] == ["ray", "open files"]


def test_a_ray_of_other_versions_is_told_from_one_that_is_not_there() -> None:
    mismatch = RuntimeError(
        "Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.11.4\n"
        "This process on node 10.0.0.2:0 was started with:\n    Ray: 2.59.1\n    Python: 3.11.4\n"
    )
    why = version_mismatch(mismatch)
    finding = bad(ClusterFacts((), "10.0.0.9:1", node("this process"), cluster_error=why))[0]
    assert finding.text == (
        "cannot join Ray at 10.0.0.9:1: it has Ray 2.60.0 on Python 3.11.4, and this process has Ray 2.59.1 on "
        "Python 3.11.4"
    )
    assert finding.advice == "use the same versions everywhere"


@pytest.mark.parametrize("name", ["python", "ray", "torch", "metrale_ray"])
def test_versions_that_differ_are_a_problem_with_the_nodes_of_each(name: str) -> None:
    other = node("n2", versions={**VERSIONS, name: "9.9"})
    finding = only(cluster(node("n1"), other, node("n3")))
    here = "n1, n3" if name == "torch" else "n1, n3, this process"
    assert finding.level == "problem"
    assert finding.text == f"nodes differ: {VERSIONS[name]} on {here}; 9.9 on n2"
    assert finding.advice == f"install the same {name} everywhere"


def test_versions_of_what_ranks_do_not_compare_are_a_warning() -> None:
    finding = only(cluster(node("n1"), node("n2", versions={**VERSIONS, "pyzmq": "28.0"})))
    assert (finding.level, finding.subject) == ("warning", "pyzmq")


def test_a_driver_with_another_build_is_a_problem_even_with_one_node() -> None:
    finding = only(cluster(node("n1"), driver=node("this process", build="b2"), num_connections=0))
    assert (finding.level, finding.subject) == ("problem", "build")
    assert finding.text == "nodes differ: b1 on n1; b2 on this process"


def test_nodes_with_another_processor_are_a_problem() -> None:
    finding = only(cluster(node("n1"), node("n2", instructions="AVX2 AuthenticAMD")))
    assert (finding.level, finding.subject) == ("problem", "kind of processor")


def test_processors_may_differ_where_every_node_has_gpus_of_one_kind() -> None:
    assert bad(cluster(node("n1", **H200), node("n2", instructions="AVX2 AuthenticAMD", **H200))) == []


def test_gpus_of_another_kind_are_a_problem_but_another_driver_is_none() -> None:
    newer = {**H200, "gpus": ["NVIDIA H200, 143771 MiB, 580.0"]}
    assert bad(cluster(node("n1", **H200), node("n2", **newer))) == []
    finding = only(cluster(node("n1", **H200), node("n2", **{**H200, "gpus": ["NVIDIA L4"]})))
    assert finding.text == "nodes differ: NVIDIA H200 on n1; NVIDIA L4 on n2"


def test_gpus_on_some_nodes_only_are_a_warning() -> None:
    finding = only(cluster(node("n1", **H200), node("n2")))
    assert (finding.level, finding.text) == ("warning", "only n1 of 2 nodes have GPUs")


def test_checkpoint_files_that_differ_or_are_missing_are_named() -> None:
    first = node("n1", checkpoint_digests={"config.json": "a", "model.safetensors": "b"})
    second = node("n2", checkpoint_digests={"config.json": "x"})
    found = {finding.subject: finding.text for finding in bad(cluster(first, second))}
    assert found == {
        "config.json": "nodes differ: a on n1; x on n2",
        "model.safetensors": "nodes differ: b on n1; not there on n2",
    }


def test_a_node_without_the_checkpoint_is_one_problem_and_no_difference() -> None:
    finding = only(cluster(node("n1"), node("n2", checkpoint_error="no such folder", checkpoint_digests={})))
    assert (finding.node, finding.subject, finding.level) == ("n2", "checkpoint", "problem")


@pytest.mark.parametrize(
    ("why", "advice"),
    [
        ("no answer within 60 s", "allow more time with --timeout-s"),
        ("ModuleNotFoundError: No module named 'metrale_ray'", "install this version of metrale-ray there"),
    ],
)
def test_a_node_that_does_not_answer_is_named_with_what_to_do(why: str, advice: str) -> None:
    finding = only(cluster(node("n1"), silent={"n2": why}, num_connections=0))
    assert (finding.node, finding.level, finding.text) == ("n2", "problem", why)
    assert finding.advice is not None
    assert advice in finding.advice
    assert judge(cluster(node("n1"), silent={"n2": why}))[0].text.endswith("has the nodes n1, n2")


def test_a_pair_that_cannot_connect_is_a_problem_with_the_ports_to_open() -> None:
    facts = cluster(node("n1"), node("n2"), unreachable={("n1", "n2"): "no answer within 3 s"})
    finding = only(facts)
    assert (finding.node, finding.text) == ("n1", "cannot reach n2: no answer within 3 s")
    assert finding.advice is not None
    assert "ports 32768-60999" in finding.advice
    assert not any("every node reaches" in other.text for other in judge(facts))


def test_a_node_that_ray_knows_by_a_loopback_address_is_a_problem_among_others() -> None:
    finding = only(cluster(node("n1", ray_address="127.0.0.1"), node("n2")))
    assert finding.text == "Ray knows n1 by a loopback address"
    one_host = [node(name, ray_address="127.0.0.1") for name in ("n1", "n2")]
    assert bad(cluster(*one_host)) == []
