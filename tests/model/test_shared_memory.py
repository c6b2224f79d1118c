# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sums between processes through shared memory, and over hosts: the bits of the plain sum, flags, lost peers."""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import pytest
import torch

from metrale_ray.errors import LinkLost
from metrale_ray.model.collectives import Collectives, sum_in_rank_order
from metrale_ray.native.library import library, why_not
from tests.gloo_rig import Ranks
from tests.model.test_collectives import (
    HIDDEN,
    Join,
    check_flags,
    fail_in_turns,
    in_process,
    reduce_without_rank_1,
    share,
    sum_steps,
)

pytestmark = [pytest.mark.skipif(library() is None, reason=why_not()), pytest.mark.processes]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sums_and_failures(join: Join, dtypes: tuple[torch.dtype, ...]) -> tuple[list[str], list[list[bytes]], list[str]]:
    """The ways that sums went, their bits for each dtype, and what was heard of ranks that fail in turns."""
    ways: list[str] = []

    def noted(*sizes: Any, **options: Any) -> Collectives:
        collectives = join(*sizes, **options)
        ways.append(collectives.way)
        return collectives

    bits = [sum_steps(noted, dtype) for dtype in dtypes]
    return ways, bits, fail_in_turns(noted)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_processes_on_one_host_get_the_bits_of_the_plain_sum_and_learn_of_failed_ranks(world: int) -> None:
    with Ranks(world, sums_and_failures, DTYPES, hosts="a" * world) as ranks:
        found = ranks.results()
    plain = [in_process(world, sum_steps, dtype)[0] for dtype in DTYPES]
    for ways, bits, _ in found:
        assert set(ways) == {"shared memory"}
        assert bits == plain
    check_flags([flags for _, _, flags in found])


@pytest.mark.gloo
@pytest.mark.parametrize("hosts", ["aab", pytest.param("abab", marks=pytest.mark.nightly)])
def test_processes_on_several_hosts_get_the_same_bits_as_one_another_and_learn_of_failed_ranks(hosts: str) -> None:
    with Ranks(len(hosts), sums_and_failures, (torch.float32,), hosts=hosts) as ranks:
        found = ranks.results()
    plain = in_process(len(hosts), sum_steps, torch.float32)[0]
    for ways, (bits,), _ in found:
        assert set(ways) == {"shared memory on each host, gloo between the 2 hosts"}
        assert bits == found[0][1][0]
    for mine, expected in zip(found[0][1][0], plain, strict=True):
        one, other = (torch.frombuffer(bytearray(b), dtype=torch.float32) for b in (mine, expected))
        torch.testing.assert_close(one, other)
    check_flags([flags for _, _, flags in found])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_processes_do_not_wait_for_one_that_died_or_stopped_longer_than_the_links_need(how: signal.Signals) -> None:
    with Ranks(2, reduce_without_rank_1, int(how), 0.3, hosts="aa") as ranks:
        assert ranks.result(0) < 3


def wait_for_one_that_closed(join: Join) -> str:
    collectives = join(4, HIDDEN)
    collectives.begin(4, 1)
    collectives.payload()
    collectives.all_reduce()
    if collectives.rank == 1:
        collectives.close()
        return "closed"

    def check_peers() -> None:  # a link that knows of it, and says why
        raise LinkLost("rank 1 was shut down", rank=1)

    collectives._end._check_peers = check_peers  # type: ignore[attr-defined]
    began = time.monotonic()
    collectives.payload()
    try:
        collectives.all_reduce()
    except LinkLost as lost:
        assert time.monotonic() - began < 5
        return lost.message
    raise AssertionError("summed without rank 1")


def test_processes_that_wait_for_one_that_left_are_told_so_by_the_links() -> None:
    with Ranks(3, wait_for_one_that_closed, hosts="aaa") as ranks:
        assert ranks.results() == ["rank 1 was shut down", "closed", "rank 1 was shut down"]


def sum_at_random_times(join: Join, num_sums: int) -> int:
    """Sums of all sizes, each rank now and then late; the number of those that were right."""
    collectives = join(256, 1024, dtype=torch.bfloat16)  # up to four chunks
    sizes, lateness = random.Random(0), random.Random(collectives.rank)
    right = 0
    for number in range(num_sums):
        num_tokens = sizes.choice((1, 1, 1, 2, 5, 64, 256))
        collectives.begin(num_tokens, 1)
        until = time.perf_counter() + lateness.choice((0, 0, 0, 2e-5, 1e-4, 5e-4))
        while time.perf_counter() < until:
            pass
        collectives.payload().fill_(float(number % 50 + collectives.rank))
        found = collectives.all_reduce()
        ranks = range(collectives.world)
        right += bool(found.eq(sum(number % 50 + rank for rank in ranks)).all())
    collectives.close()
    return right


def test_many_sums_with_late_ranks_are_all_right(scale: int) -> None:
    num_sums = 1000 * scale
    with Ranks(2, sum_at_random_times, num_sums, hosts="aa") as ranks:
        assert ranks.results() == [num_sums] * 2


def test_the_plain_sum_is_rounded_once() -> None:
    payloads = [share(rank, 0, 8, torch.bfloat16) for rank in range(5)]
    exact = sum(payload.double() for payload in payloads)
    assert isinstance(exact, torch.Tensor)
    assert sum_in_rank_order(payloads).equal(exact.to(torch.bfloat16))
    assert payloads[0].equal(share(0, 0, 8, torch.bfloat16))
