# SPDX-License-Identifier: MIT OR Apache-2.0
"""The sums between ranks: the same over threads under a baton and over processes joined by gloo."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from metrale_ray.baton import Baton
from metrale_ray.errors import LinkLost, PeerFailed
from metrale_ray.model.collectives import (
    Collectives,
    InProcess,
    InProcessGroup,
    OneRank,
)
from metrale_ray.model.torch_distributed import TorchDistributed, _wait_slice, host_store, join_store
from tests.gloo_rig import Ranks

HIDDEN = 16
Join = Callable[..., Collectives]


def share(rank: int, step: int, num_tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)


def sum_steps(join: Join, dtype: torch.dtype) -> list[bytes]:
    """The bits of the sums of several steps of different sizes."""
    collectives = join(64, HIDDEN, dtype=dtype)
    found = []
    for step, num_tokens in enumerate((1, 2, 5, 31, 64, 3)):
        collectives.begin(num_tokens, 2)
        for _ in range(2):
            collectives.payload().copy_(share(collectives.rank, step, num_tokens, dtype))
            found.append(collectives.all_reduce().float().numpy().tobytes())
    collectives.close()
    return found


def fail_in_turns(join: Join) -> list[str]:
    """Each rank fails once before its second reduction; afterwards a healthy step follows."""
    collectives = join(4, HIDDEN)
    seen = []
    for failing in range(collectives.world):
        collectives.begin(4, 3)
        collectives.payload().fill_(1.0)
        collectives.all_reduce()
        if collectives.rank == failing:
            collectives.report_failure()
            collectives.report_failure()  # nothing is left of this step: it must not enter another reduction
            seen.append("failed")
        else:
            collectives.payload().fill_(1.0)
            try:
                collectives.all_reduce()
            except PeerFailed:
                seen.append("told")
        collectives.begin(2, 1)
        collectives.payload().fill_(1.0)
        assert collectives.all_reduce().eq(collectives.world).all()
    collectives.close()
    return seen


def in_process(world: int, task: Callable[..., Any], *arguments: Any, seed: int = 0) -> list[Any]:
    baton = Baton(seed)
    group = InProcessGroup(baton, world)

    def run(rank: int) -> Any:
        def join(max_tokens: int, hidden_size: int, dtype: torch.dtype = torch.float32) -> Collectives:
            return InProcess(group, rank, max_tokens, hidden_size, dtype)

        return task(join, *arguments)

    results = baton.run({str(rank): (lambda rank=rank: run(rank)) for rank in range(world)})
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[str(rank)] for rank in range(world)]


def test_one_ranks_sum_is_its_own_share() -> None:
    collectives = OneRank(0, 1, 4, HIDDEN, torch.float32, "cpu")
    collectives.begin(3, 1)
    collectives.payload().copy_(share(0, 0, 3))
    assert collectives.all_reduce().equal(share(0, 0, 3))


def test_a_payload_is_zero_whatever_the_last_step_left_there() -> None:
    collectives = OneRank(0, 1, 4, HIDDEN, torch.float32, "cpu")
    collectives.begin(4, 1)
    collectives.payload().fill_(float("nan"))
    collectives.begin(2, 1)
    assert collectives.payload().eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_threads_get_the_sum_in_rank_order_with_the_same_bits(world: int, dtype: torch.dtype) -> None:
    results = in_process(world, sum_steps, dtype)
    assert all(result == results[0] for result in results)
    expected = share(0, 0, 1, dtype).float()
    for rank in range(1, world):
        expected = expected + share(rank, 0, 1, dtype).float()
    assert results[0][0] == expected.to(dtype).float().numpy().tobytes()


@pytest.mark.gloo
@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float32), (3, torch.bfloat16), (4, torch.float32)])
def test_processes_get_the_same_bits_as_one_another(world: int, dtype: torch.dtype) -> None:
    with Ranks(world, sum_steps, dtype) as ranks:
        results = ranks.results()
    assert all(result == results[0] for result in results)
    threads = in_process(world, sum_steps, dtype)[0]
    for mine, theirs in zip(results[0], threads, strict=True):
        one, other = (torch.frombuffer(bytearray(b), dtype=torch.float32) for b in (mine, theirs))
        torch.testing.assert_close(one, other, rtol=0.02 if dtype is torch.bfloat16 else 1e-5, atol=0.05)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_threads_learn_of_a_failed_rank_in_the_next_reduction_and_go_on(world: int) -> None:
    check_flags(in_process(world, fail_in_turns))


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_processes_learn_of_a_failed_rank_in_the_next_reduction_and_go_on(world: int) -> None:
    with Ranks(world, fail_in_turns) as ranks:
        check_flags(ranks.results())


def check_flags(results: list[list[str]]) -> None:
    world = len(results)
    for rank, seen in enumerate(results):
        assert seen == ["failed" if turn == rank else "told" for turn in range(world)]


def test_threads_that_wait_for_one_that_has_left_are_told_who() -> None:
    def task(join: Join) -> str:
        collectives = join(4, HIDDEN)
        if collectives.rank == 1:
            collectives.close()
            return "left"
        collectives.begin(4, 1)
        collectives.payload()
        with pytest.raises(LinkLost) as caught:
            collectives.all_reduce()
        return f"told of rank {caught.value.rank}"

    assert in_process(3, task) == ["told of rank 1", "left", "told of rank 1"]


def test_threads_that_wait_too_long_are_told_who_is_missing() -> None:
    baton = Baton()
    group = InProcessGroup(baton, 2)

    def waits() -> None:
        collectives = InProcess(group, 0, 4, HIDDEN, torch.float32, timeout_s=5)
        collectives.begin(4, 1)
        collectives.payload()
        collectives.all_reduce()

    result = baton.run({"0": waits, "1": lambda: baton.wait_until(lambda: baton.now > 7, 8)})["0"]
    assert isinstance(result, LinkLost)
    assert (result.rank, "deadline passed" in result.message) == (1, True)


def reduce_without_rank_1(join: Join, how: int, known_after_s: float = 2.0) -> float:
    """Seconds until the lost peer is noticed; rank 1 kills or stops itself instead of entering."""
    stopped_at = 0.0

    def check_peers() -> None:  # as a link does: it knows after a while
        if stopped_at and time.monotonic() - stopped_at > known_after_s:
            raise LinkLost("rank 1 is silent", rank=1)

    collectives = join(4, HIDDEN, check_peers=check_peers)
    collectives.begin(4, 2)
    collectives.payload()
    collectives.all_reduce()
    if collectives.rank == 1:
        os.kill(os.getpid(), how)
    stopped_at = time.monotonic()
    collectives.payload()
    try:
        collectives.all_reduce()
    except LinkLost:
        collectives.close()  # must not wait for the lost peer
        return time.monotonic() - stopped_at
    raise AssertionError("summed without rank 1")


@pytest.mark.gloo
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_processes_do_not_wait_for_one_that_died_or_stopped_longer_than_the_links_need(how: signal.Signals) -> None:
    with Ranks(2, reduce_without_rank_1, int(how)) as ranks:
        assert ranks.result(0) < 5


class LateWork:
    """A reduction that completes just after a slice of its wait has ended, well or badly."""

    def __init__(self, failure: RuntimeError | None) -> None:
        self._failure = failure

    def wait(self, timeout: Any = None) -> None:
        if timeout is not None:
            raise RuntimeError("the slice has ended")
        if self._failure is not None:
            raise self._failure

    def is_completed(self) -> bool:
        return True


def test_a_reduction_that_completes_at_the_end_of_a_slice_is_not_lost() -> None:
    assert _wait_slice(LateWork(None))
    with pytest.raises(RuntimeError, match="connection closed"):
        _wait_slice(LateWork(RuntimeError("connection closed")))


def test_a_rank_whose_peers_do_not_come_says_where_it_waited_and_what_they_need() -> None:
    store, _ = host_store("127.0.0.1", 30.0)
    with pytest.raises(
        LinkLost, match=r"rank 0 at 127\.0\.0\.1 could not join .* within 0\.2 s; every node must be able"
    ):
        TorchDistributed(
            *(0, 2, 4, HIDDEN, torch.float32, "cpu"),
            store=store,
            host="127.0.0.1",
            timeout_s=0.2,
            check_peers=lambda: None,
        )


def test_a_meeting_point_that_nobody_hosts_is_named() -> None:
    with pytest.raises(LinkLost, match=r"meeting point at 127\.0\.0\.1:1 cannot be reached"):
        join_store("127.0.0.1", 1, 0.2)
