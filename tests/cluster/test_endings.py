# SPDX-License-Identifier: MIT OR Apache-2.0
"""Why an engine has ended: one error out of what its ranks say."""

from __future__ import annotations

import pytest

from metrale_ray.cluster.endings import unreachable, unstarted, worst
from metrale_ray.errors import EngineDead, LinkLost, MetraleError

Reasons = list[tuple[int, MetraleError | None]]


def place_of(rank: int) -> str:
    return f"rank {rank} on 10.0.0.{rank}"


@pytest.mark.parametrize(
    ("reasons", "message", "rank"),
    [
        ([(0, EngineDead("rank 1: it left", rank=1)), (1, None)], "rank 1 on 10.0.0.1: it left", 1),
        (
            [(0, EngineDead("it left", rank=1)), (1, LinkLost("no memory"))],
            "rank 1 on 10.0.0.1: it left (no memory)",
            1,
        ),
        ([(0, EngineDead("it left", rank=1)), (2, LinkLost("no memory"))], "rank 1 on 10.0.0.1: it left", 1),
        ([(1, LinkLost("the head has gone", rank=0))], "rank 1 on 10.0.0.1: the head has gone", 0),
        ([(0, None), (2, LinkLost("no memory"))], "rank 2 on 10.0.0.2: no memory", 2),
        ([(0, LinkLost("no memory"))], "rank 0 on 10.0.0.0: no memory", 0),
        ([(0, LinkLost("rank 0: no memory"))], "rank 0 on 10.0.0.0: no memory", 0),
        ([(0, None), (2, LinkLost("rank 2 has no memory"))], "rank 2 on 10.0.0.2 has no memory", 2),
        ([(0, EngineDead("rank 1 has gone: it left", rank=1))], "rank 1 on 10.0.0.1 has gone: it left", 1),
        ([(0, EngineDead("rank 10 is not rank 1", rank=1))], "rank 1 on 10.0.0.1: rank 10 is not rank 1", 1),
        ([(2, None)], "rank 2 on 10.0.0.2 ended", 2),
    ],
)
def test_one_error_names_the_rank_at_fault_and_the_one_that_tells_with_its_node(
    reasons: Reasons, message: str, rank: int
) -> None:
    dead = worst(reasons, place_of)
    assert (dead.message, dead.rank) == (message, rank)


def test_a_rank_is_told_by_its_number_alone_where_there_is_one_node() -> None:
    dead = worst([(0, EngineDead("rank 1: it left", rank=1))], lambda rank: f"rank {rank}")
    assert dead.message == "rank 1: it left"


def test_a_rank_that_names_itself_is_named_once_where_there_is_one_node() -> None:
    dead = worst([(2, LinkLost("rank 2: no memory"))], lambda rank: f"rank {rank}")
    assert dead.message == "rank 2: no memory"


def test_a_ray_that_wants_a_token_is_told_from_one_that_is_not_there() -> None:
    absent = ConnectionError("Failed to connect\nmore")
    assert unreachable("10.0.0.1:6379", absent).message == "cannot reach Ray at '10.0.0.1:6379': Failed to connect"
    assert unreachable("local", absent).message == "cannot start a Ray here: Failed to connect"
    absent.__cause__ = RuntimeError("ray.exceptions.AuthenticationError: InvalidAuthToken")
    assert "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN" in unreachable("10.0.0.1:6379", absent).message


def test_a_ray_of_another_version_is_told_with_all_four_versions() -> None:
    mismatch = RuntimeError(
        "Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.11.4\n"
        "This process on node 10.0.0.2:0 was started with:\n    Ray: 2.59.1\n    Python: 3.12.1\n"
    )
    assert unreachable("10.0.0.1:6379", mismatch).message == (
        "cannot join Ray at '10.0.0.1:6379': it has Ray 2.60.0 on Python 3.11.4, and this process has Ray 2.59.1 on "
        "Python 3.12.1; use the same versions everywhere"
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "The actor died because of an error raised in its creation task\n  File x\n"
            "ModuleNotFoundError: No module named 'zmq'",
            "zmq is not installed there; install metrale-ray with its dependencies there, "
            "in the Python that Ray runs in",
        ),
        ("its node died", "its node died"),
    ],
)
def test_a_rank_that_does_not_start_is_named_with_what_its_node_lacks(text: str, told: str) -> None:
    assert unstarted("rank 1 on 10.0.0.2", RuntimeError(text)).message == f"rank 1 on 10.0.0.2 did not start: {told}"
