# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Gathering`: how rows that lie in columns over the ranks come together on rank 0, some rows at a time.

Rules. Each rank has some columns of every row, in rank order; how many of each is settled at start. The pieces of a
gather, and their sizes, follow from the number of rows alone, so that all ranks go through the same ones: also a rank
that has failed, and one whose columns are none. Every rank's piece has the size of the widest one and ends with the
failure flag. The buffers of a piece are made at start, so a failure to make room for the rows can still be reported.

Leaves out: how a piece gets to rank 0 (`Collectives`). Shapes: R rows, W columns of this rank, V of all ranks, G ranks,
I items of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

# Of all ranks' columns together in one piece: 2 MB, which are still in the cache when they are copied on.
PIECE_ITEMS = 2**19
DTYPE = torch.float32


class Gathering:
    """Of one rank. `widths` are the columns of each rank."""

    def __init__(self, rank: int, widths: Sequence[int], device: torch.device) -> None:
        self.num_columns = sum(widths)
        self._rank = rank
        self._widths = tuple(widths)
        self._width = max(widths)
        self._rows_each = max(1, PIECE_ITEMS // max(1, self.num_columns))
        num_items = self._num_items(self._rows_each)
        self._piece = torch.zeros(num_items, dtype=DTYPE, device=device)
        self._pieces = torch.zeros(num_items * len(widths) if rank == 0 else 0, dtype=DTYPE, device=device)
        self._rows_RV = torch.empty((0, self.num_columns), dtype=DTYPE, device=device)

    def room(self, num_rows: int) -> torch.Tensor | None:
        """Where so many rows come together, [R, V]: on rank 0, None elsewhere. What an earlier one held is lost."""
        if self._rank != 0:
            return None
        if len(self._rows_RV) < num_rows:
            self._rows_RV = self._rows_RV.new_empty((num_rows, self.num_columns))
        return self._rows_RV[:num_rows]

    def pieces(
        self, num_rows: int, part_RW: torch.Tensor | None
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
        """Each piece: its rows, what this rank gives [I], and on rank 0 where those of all ranks go [G, I].

        `part_RW` are this rank's columns; None: it has failed.
        """
        for start in range(0, num_rows, self._rows_each):
            rows = slice(start, min(start + self._rows_each, num_rows))
            count = rows.stop - start
            num_items = self._num_items(count)
            mine_I = self._piece[:num_items]
            mine_I[-1] = 1.0 if part_RW is None else 0.0
            if part_RW is not None:
                self._columns(mine_I, count, self._rank).copy_(part_RW[rows])
            yield rows, mine_I, self._of_all(num_items) if self._rank == 0 else None

    def take(self, rows: slice, pieces_GI: torch.Tensor, into_RV: torch.Tensor | None) -> bool:
        """Put the pieces of all ranks where their rows come together, if anywhere; whether a flag is up in them."""
        if into_RV is not None:
            ends = list(accumulate(self._widths))
            for rank, (width, end) in enumerate(zip(self._widths, ends, strict=True)):
                columns_RW = self._columns(pieces_GI[rank], rows.stop - rows.start, rank)
                into_RV[rows, end - width : end].copy_(columns_RW)
        return bool((pieces_GI[:, -1] > 0).any())

    @property
    def largest(self) -> int:
        """Items of the largest piece of one rank."""
        return len(self._piece)

    def _num_items(self, num_rows: int) -> int:
        return num_rows * self._width + 1

    def _columns(self, piece_I: torch.Tensor, num_rows: int, rank: int) -> torch.Tensor:
        width = self._widths[rank]
        return piece_I[: num_rows * width].view(num_rows, width)

    def _of_all(self, num_items: int) -> torch.Tensor:
        num_ranks = len(self._widths)
        return self._pieces[: num_ranks * num_items].view(num_ranks, num_items)
