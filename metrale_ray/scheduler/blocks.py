# SPDX-License-Identifier: MIT OR Apache-2.0
"""`BlockPool`: which blocks of the KV cache are free.

Rules: the head alone allocates; a block has at most one owner; a call that fails changes nothing. Ranks never
allocate, they get block tables in the commands. It leaves out sharing of blocks between sequences.
"""

from __future__ import annotations

from collections.abc import Collection

from metrale_ray.protocol.commands import BlockId


class BlockPool:
    """Blocks 0 to `num_blocks` - 1, of which some are free."""

    def __init__(self, num_blocks: int) -> None:
        self.num_total_blocks = num_blocks
        self._free = [BlockId(block) for block in reversed(range(num_blocks))]  # a stack, lowest number on top
        self._is_used = bytearray(num_blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Take `num_blocks` blocks. Raises ValueError when fewer are free, or the number is negative."""
        if not 0 <= num_blocks <= len(self._free):
            raise ValueError(f"{num_blocks} blocks asked for; 0 to {len(self._free)} can be given")
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block in taken:
            self._is_used[block] = 1
        return taken

    def release(self, blocks: Collection[BlockId]) -> None:
        """Give blocks back. Raises ValueError when one has no owner, is not of this pool, or is named twice."""
        for block in blocks:
            if not 0 <= block < self.num_total_blocks:
                raise ValueError(f"block {block} does not exist; the pool has blocks 0 to {self.num_total_blocks - 1}")
            if not self._is_used[block]:
                raise ValueError(f"block {block} is already free: a second release would give it two owners")
        if len(set(blocks)) != len(blocks):
            raise ValueError(f"a block is named twice in one release: {sorted(blocks)}")
        for block in blocks:
            self._is_used[block] = 0
        self._free.extend(blocks)
