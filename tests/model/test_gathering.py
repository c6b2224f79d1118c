# SPDX-License-Identifier: MIT OR Apache-2.0
"""Gathers to rank 0: columns of any widths come together in rank order, and a rank that fails ends every wait."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.errors import PeerFailed
from metrale_ray.model import gathering
from metrale_ray.model.collectives import Collectives, OneRank
from metrale_ray.native.library import library, why_not
from tests.gloo_rig import Ranks
from tests.model.test_collectives import HIDDEN, in_process

Join = Callable[..., Collectives]
WIDTHS = (5, 3, 0, 4)
PIECE_ITEMS = 24  # some rows in a piece, and several pieces in a gather


def part(rank: int, rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(100 * rows + rank))


def expected(world: int, rows: int) -> list[list[float]]:
    return torch.cat([part(rank, rows, WIDTHS[rank]) for rank in range(world)], dim=1).tolist()


def joined(join: Join) -> Collectives:
    collectives = join(4, HIDDEN)
    with mock.patch.object(gathering, "PIECE_ITEMS", PIECE_ITEMS):
        collectives.plan_gather(WIDTHS[: collectives.world])
    return collectives


def gather_steps(join: Join) -> list[Any]:
    """What a rank gets from the gathers of steps of several sizes, each behind a sum."""
    collectives, found = joined(join), []
    for rows in (1, 2, 3, 4, 17):
        collectives.begin(2, 1, rows)
        collectives.payload().fill_(1.0)
        assert collectives.all_reduce().eq(collectives.world).all()
        got = collectives.gather(part(collectives.rank, rows, WIDTHS[collectives.rank]))
        found.append(None if got is None else got.tolist())
    collectives.close()
    return found


def fail_before_the_gather(join: Join) -> list[str]:
    """Each rank fails once when only the gather is left, and once before the last sum; then a healthy step follows."""
    collectives, seen = joined(join), []
    mine, rows = WIDTHS[collectives.rank], 7
    for failing in range(collectives.world):
        for num_left in (0, 1):
            collectives.begin(2, num_left, rows)
            try:
                if collectives.rank == failing:
                    collectives.report_failure()
                    collectives.report_failure()  # nothing is left of this step
                    seen.append("failed")
                    continue
                for _ in range(num_left):
                    collectives.payload()
                    collectives.all_reduce()
                collectives.gather(part(collectives.rank, rows, mine))
                seen.append("went on")
            except PeerFailed:
                seen.append("told")
                collectives.report_failure()  # nothing is left either
        collectives.begin(2, 1, 1)
        collectives.payload().fill_(1.0)
        assert collectives.all_reduce().eq(collectives.world).all()
        collectives.gather(part(collectives.rank, 1, mine))
    collectives.close()
    return seen


def check_rows(found: list[list[Any]]) -> None:
    world = len(found)
    assert found[0] == [expected(world, rows) for rows in (1, 2, 3, 4, 17)]
    assert all(other == [None] * 5 for other in found[1:])


def check_failures(found: list[list[str]]) -> None:
    """Of a failure before the gather rank 0 alone is told; of one before a sum all are."""
    for rank, seen in enumerate(found):
        of_gather = "told" if rank == 0 else "went on"
        for failing in range(len(found)):
            told = seen[2 * failing : 2 * failing + 2]
            assert told == (["failed", "failed"] if failing == rank else [of_gather, "told"])


def both(join: Join) -> tuple[list[Any], list[str]]:
    return gather_steps(join), fail_before_the_gather(join)


def check_both(found: list[tuple[list[Any], list[str]]]) -> None:
    check_rows([rows for rows, _ in found])
    check_failures([seen for _, seen in found])


@pytest.mark.parametrize("world", [2, 3, 4])
def test_threads_gather_to_rank_0_and_none_waits_for_one_that_failed(world: int) -> None:
    check_rows(in_process(world, gather_steps))
    check_failures(in_process(world, fail_before_the_gather))


@pytest.mark.gloo
def test_processes_gather_by_gloo_and_none_waits_for_one_that_failed() -> None:
    with Ranks(3, both) as ranks:
        check_both(ranks.results())


@pytest.mark.processes
@pytest.mark.skipif(library() is None, reason=why_not())
@pytest.mark.parametrize("world", [2, 4])
def test_processes_gather_through_shared_memory_and_none_waits_for_one_that_failed(world: int) -> None:
    with Ranks(world, both, hosts="a" * world) as ranks:
        check_both(ranks.results())


@pytest.mark.gloo
@pytest.mark.skipif(library() is None, reason=why_not())
@pytest.mark.parametrize("hosts", ["aab", pytest.param("abab", marks=pytest.mark.nightly)])
def test_processes_on_several_hosts_gather_and_none_waits_for_one_that_failed(hosts: str) -> None:
    with Ranks(len(hosts), both, hosts=hosts) as ranks:
        check_both(ranks.results())


@given(
    widths=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    num_rows=st.integers(1, 20),
    piece_items=st.integers(1, 60),
)
def test_rows_of_any_widths_come_together_whatever_the_size_of_a_piece(
    widths: list[int], num_rows: int, piece_items: int
) -> None:
    cpu = torch.device("cpu")
    with mock.patch.object(gathering, "PIECE_ITEMS", piece_items):
        ends = [gathering.Gathering(rank, widths, cpu) for rank in range(len(widths))]
    parts = [part(rank, num_rows, width) for rank, width in enumerate(widths)]
    into_RV = ends[0].room(num_rows)
    assert into_RV is not None
    into_RV.fill_(float("nan"))
    streams = [end.pieces(num_rows, mine) for end, mine in zip(ends, parts, strict=True)]
    for pieces in zip(*streams, strict=True):
        rows, _, pieces_GI = pieces[0]
        assert {(piece[0].start, piece[0].stop, len(piece[1])) for piece in pieces} == {
            (rows.start, rows.stop, len(pieces[0][1]))
        }
        assert pieces_GI is not None
        for rank, (_, mine_I, _) in enumerate(pieces):
            pieces_GI[rank].copy_(mine_I)
        assert not ends[0].take(rows, pieces_GI, into_RV)
    assert into_RV.equal(torch.cat(parts, dim=1))


def test_a_rank_without_room_for_the_rows_still_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_make_room(self: gathering.Gathering, num_rows: int) -> torch.Tensor | None:
        raise MemoryError("no room")

    def task(join: Join) -> str:
        collectives = joined(join)
        collectives.begin(2, 0, 3)
        if collectives.rank == 0:
            monkeypatch.setattr(collectives._gathering, "room", partial(fail_to_make_room, collectives._gathering))
        try:
            collectives.gather(part(collectives.rank, 3, WIDTHS[collectives.rank]))
        except MemoryError:
            collectives.report_failure()
            return "failed"
        return "went on"

    assert in_process(3, task) == ["failed", "went on", "went on"]


def test_one_rank_gathers_its_own_rows() -> None:
    collectives = OneRank(0, 1, 4, HIDDEN, torch.float32, "cpu")
    collectives.plan_gather([3])
    collectives.begin(2, 0, 2)
    got = collectives.gather(part(0, 2, 3))
    assert got is not None
    assert got.equal(part(0, 2, 3))
