# SPDX-License-Identifier: MIT OR Apache-2.0
"""Memory that ranks share: sums and broadcasts step by step in every order, in one process, and who may map it."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.errors import LinkLost
from metrale_ray.model.collectives import sum_in_rank_order
from metrale_ray.model.segment import FORMATS, Segment, SegmentEnd
from metrale_ray.native.library import library, why_not

pytestmark = pytest.mark.skipif(library() is None, reason=why_not())

PAGE = 4096  # the smallest slots: most payloads go through in several chunks
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DONE, NOT_YET, LEFT = range(3)


@dataclass(frozen=True)
class Operation:
    """A sum, or a broadcast from `root`, of so many items."""

    num_items: int
    dtype: torch.dtype
    root: int | None = None

    def payload(self, number: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * number + rank)
        return torch.randn(self.num_items, generator=generator).to(self.dtype)

    def result(self, number: int, world: int) -> torch.Tensor:
        if self.root is not None:
            return self.payload(number, self.root)
        return sum_in_rank_order([self.payload(number, rank) for rank in range(world)])


class Cores:
    """Every rank's end in the native core, called one at a time by one thread."""

    def __init__(self, world: int, slot_bytes: int = PAGE, spin_us: int = 0) -> None:
        core: Any = library()
        self.world = world
        self.segment = Segment.make(world, slot_bytes)
        self._core = core
        address = self.segment.address
        self.ends = [
            core.mr_shared_open(self.segment.start, address.num_bytes, address.token, rank, world, spin_us)
            for rank in range(world)
        ]
        assert all(self.ends)

    def attempt(self, rank: int, operation: Operation, payload: torch.Tensor, timeout_us: int = 0) -> int:
        """One call of the core."""
        end, at, num_items = self.ends[rank], payload.data_ptr(), payload.numel()
        if operation.root is None:
            return int(self._core.mr_shared_sum(end, at, num_items, FORMATS[operation.dtype], timeout_us))
        return int(self._core.mr_shared_broadcast(end, operation.root, at, payload.nbytes, timeout_us))

    def awaited(self, rank: int) -> int:
        return int(self._core.mr_shared_awaited(self.ends[rank]))

    def leave(self, rank: int) -> None:
        end, self.ends[rank] = self.ends[rank], None
        if end is not None:
            self._core.mr_shared_close(end)

    def __enter__(self) -> Cores:
        return self

    def __exit__(self, *error: object) -> None:
        for rank in range(self.world):
            self.leave(rank)
        self.segment.close()


def any_operation(world: int) -> st.SearchStrategy[Operation]:
    return st.builds(
        Operation,
        st.sampled_from((1, 2, 33, 1000, 4097)),
        st.sampled_from(DTYPES),
        st.one_of(st.none(), st.integers(0, world - 1)),
    )


def run_in_any_order(cores: Cores, operations: Sequence[Operation], chance: random.Random) -> None:
    """All ranks through all operations, in steps that `chance` picks; each result is checked when it is there."""
    places = dict.fromkeys(range(cores.world), 0)
    results = [operation.result(number, cores.world) for number, operation in enumerate(operations)]
    payloads = {rank: operations[0].payload(0, rank) for rank in places}
    stuck = 0
    while places:
        rank = chance.choice(list(places))
        number = places[rank]
        outcome = cores.attempt(rank, operations[number], payloads[rank])
        stuck = stuck + 1 if outcome == NOT_YET else 0
        assert outcome in (DONE, NOT_YET)
        assert stuck < 1000
        if outcome == NOT_YET:
            continue
        assert payloads[rank].equal(results[number]), (rank, number, operations[number])
        places[rank] += 1
        if places[rank] == len(operations):
            del places[rank]
        else:
            payloads[rank] = operations[number + 1].payload(number + 1, rank)


@given(st.data())
def test_whatever_the_order_of_the_ranks_steps_each_gets_the_plain_sum_and_the_roots_broadcast(data: Any) -> None:
    world = data.draw(st.integers(1, 5))
    drawn = data.draw(st.lists(any_operation(world), min_size=1, max_size=6))
    with Cores(world) as cores:
        run_in_any_order(cores, drawn, random.Random(data.draw(st.integers(0, 2**32))))


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_payloads_larger_than_a_slot_and_added_up_in_parts_have_the_plain_sums_bits(world: int) -> None:
    drawn = [Operation(num_items, dtype) for num_items in (40_000, 70_001) for dtype in DTYPES]
    with Cores(world, 16 * PAGE) as cores:
        run_in_any_order(cores, drawn, random.Random(world))


@pytest.fixture(params=["generic", "avx2", "avx512"])
def _instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    core: Any = library()
    used = core.mr_instructions()
    if core.mr_use_instructions(request.param.encode()) != 0:
        pytest.skip(f"this processor or this core has no {request.param}")
    yield
    core.mr_use_instructions(used)


def sum_of_two(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    operation = Operation(left.numel(), left.dtype)
    with Cores(2, 64 * PAGE) as cores:
        mine, theirs = left.clone(), right.clone()
        assert cores.attempt(0, operation, mine) == NOT_YET
        assert cores.attempt(1, operation, theirs) == DONE
        assert cores.attempt(0, operation, mine) == DONE
    assert mine.view(torch.uint8).equal(theirs.view(torch.uint8))
    return mine


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_survives_a_sum_with_zero(dtype: torch.dtype) -> None:
    everything = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    found = sum_of_two(everything, torch.zeros_like(everything))
    assert torch.equal(found.isnan(), everything.isnan())
    assert torch.where(found.isnan(), 0, found).equal(torch.where(everything.isnan(), 0, everything))


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-7, 1e-5, 1.0, 6e4])
def test_sums_are_rounded_as_torch_rounds(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = ((2 * torch.rand(2, 30_001, generator=generator) - 1) * scale).to(dtype).unbind()
    assert sum_of_two(left, right).equal(sum_in_rank_order([left, right]))


def test_a_rank_that_left_is_told_of_to_those_that_need_it_and_not_to_those_that_have_its_part() -> None:
    operation = Operation(100, torch.float32)
    first, second = operation.payload(0, 0), operation.payload(0, 1)
    with Cores(3) as cores:
        assert cores.attempt(0, operation, first) == NOT_YET
        assert cores.attempt(1, operation, second) == NOT_YET
        cores.leave(1)
        assert cores.attempt(2, operation, operation.payload(0, 2)) == DONE
        assert cores.attempt(0, operation, first) == DONE
        assert cores.attempt(0, operation, first) == LEFT
        assert cores.awaited(0) == 1


def test_a_wait_ends_at_its_time_limit_and_a_sleeper_is_woken_when_the_other_comes() -> None:
    operation = Operation(10, torch.float32)
    with Cores(2) as cores:
        first, second = operation.payload(0, 0), operation.payload(0, 1)
        assert cores.attempt(0, operation, first, timeout_us=2000) == NOT_YET
        outcomes: list[int] = []
        thread = threading.Thread(target=lambda: outcomes.append(cores.attempt(0, operation, first, 30_000_000)))
        thread.start()
        assert cores.attempt(1, operation, second) == DONE
        thread.join(timeout=20)
        assert outcomes == [DONE]


def end_of(segment: Segment, rank: int, pids: dict[int, int] | None = None, **changes: Any) -> SegmentEnd:
    limits: dict[str, Any] = {"spin_us": 0, "timeout_s": 0.2, "check_peers": lambda: None, **changes}
    return SegmentEnd(segment, rank, (4, 7), pids or {}, **limits)


def test_a_rank_that_does_not_come_is_named_at_the_deadline_and_nothing_is_summed_afterwards() -> None:
    end = end_of(Segment.make(2), 4)
    with pytest.raises(LinkLost, match=r"rank 7 did not come to a reduction within 0\.2 s") as caught:
        end.sum(torch.zeros(3))
    assert caught.value.rank == 7
    with pytest.raises(LinkLost, match="given up before"):
        end.sum(torch.zeros(3))
    end.close()
    end.close()
    with pytest.raises(LinkLost, match="was closed"):
        end.sum(torch.zeros(3))


def test_peers_are_looked_at_while_a_rank_waits() -> None:
    def check_peers() -> None:
        raise LinkLost("rank 7 is silent", rank=7)

    end = end_of(Segment.make(2), 4, timeout_s=60, check_peers=check_peers)
    with pytest.raises(LinkLost, match="rank 7 is silent"):
        end.broadcast(7, torch.zeros(3))
    end.close()


def test_a_segment_is_found_by_its_address_until_it_is_sealed() -> None:
    made = Segment.make(2)
    found = Segment.find(made.address)
    with pytest.raises(OSError, match="is another segment"):
        end_of(Segment(replace(made.address, token=made.address.token ^ 1), found._memory, False), 7)
    with pytest.raises(OSError, match=f"has {made.address.num_bytes} bytes, not 5"):
        Segment.find(replace(made.address, num_bytes=5))
    made.seal()
    made.seal()
    with pytest.raises(FileNotFoundError):
        Segment.find(made.address)
    found.close()
    made.close()


def test_slots_are_whole_pages() -> None:
    with pytest.raises(ValueError, match="slots of 100 bytes; slots are whole pages"):
        Segment.make(2, 100)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "metrale-ray" in line]


@pytest.mark.parametrize("use", [lambda end: end.close(), lambda end: (end.seal(), end.close())])
def test_an_end_that_is_closed_leaves_no_descriptor_and_no_memory(use: Callable[[SegmentEnd], object]) -> None:
    before = descriptors()
    end = end_of(Segment.make(2), 4, {4: os.getpid(), 7: os.getpid()})
    assert mappings()
    use(end)
    assert descriptors() == before
    assert not mappings()
