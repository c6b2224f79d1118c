# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests of `scheduler/blocks.py`: no block is lost, none has two owners."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from metrale_ray.protocol.commands import BlockId
from metrale_ray.scheduler.blocks import BlockPool

NUM_BLOCKS = 7


def test_a_new_pool_gives_its_lowest_blocks_first() -> None:
    assert BlockPool(5).allocate(3) == [0, 1, 2]


def test_more_blocks_than_are_free_are_refused_and_nothing_changes() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(ValueError, match=r"2 blocks asked for; 0 to 1 can be given"):
        pool.allocate(2)
    assert pool.num_free_blocks == 1


def test_a_negative_number_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 blocks asked for"):
        BlockPool(3).allocate(-1)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [([0, 2], "block 2 is already free"), ([0, 0], "named twice"), ([0, 9], "block 9 does not exist"), ([-1], "-1")],
)
def test_a_wrong_release_is_refused_and_nothing_changes(blocks: list[int], message: str) -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(ValueError, match=message):
        pool.release([BlockId(block) for block in blocks])
    assert pool.num_free_blocks == 1
    pool.release([BlockId(0), BlockId(1)])
    assert pool.num_free_blocks == 3


class BlockPoolMachine(RuleBasedStateMachine):
    """The pool against a plain set of owned blocks, under any order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.owned: set[BlockId] = set()

    @rule(num_blocks=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, num_blocks: int) -> None:
        if num_blocks > NUM_BLOCKS - len(self.owned):
            with pytest.raises(ValueError, match="asked for"):
                self.pool.allocate(num_blocks)
            return
        taken = self.pool.allocate(num_blocks)
        assert len(set(taken)) == num_blocks
        assert not self.owned & set(taken)
        assert set(taken) <= set(range(NUM_BLOCKS))
        self.owned |= set(taken)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        given = data.draw(st.sets(st.sampled_from(sorted(self.owned)), min_size=1))
        self.pool.release(given)
        self.owned -= given

    @rule(block=st.integers(-2, NUM_BLOCKS + 1))
    def release_wrongly(self, block: int) -> None:
        if block not in self.owned:
            with pytest.raises(ValueError, match=rf"block {block} "):
                self.pool.release([*self.owned, BlockId(block)])

    @invariant()
    def free_and_owned_make_up_all(self) -> None:
        assert self.pool.num_free_blocks + len(self.owned) == self.pool.num_total_blocks == NUM_BLOCKS


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(stateful_step_count=20)  # seven blocks are used up and back well before
