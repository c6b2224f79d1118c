# SPDX-License-Identifier: MIT OR Apache-2.0
"""Part Forward: one step of some sequences.

Every rank runs the same method for a command, so the collectives line up. A method returns the logits asked for by
each span's `logits` (none, last or all rows), one after another in span order, as fp32 [rows, vocab] on rank 0, and
None on other ranks. They are valid until the next step. A method changes no length and no block table: KV rows past the
settled length are scratch until the command is settled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.protocol.commands import Span


class Forward(ABC):
    """Prefill, decode and the two mixed."""

    @property
    @abstractmethod
    def kv_block_size(self) -> int:
        """Tokens per KV block."""

    @abstractmethod
    def num_reductions(self) -> int:
        """Sums over the ranks in one step, whatever its rows."""

    def num_gathered_rows(self, spans: Sequence[Span]) -> int:
        """Rows of logits that a step of these spans gathers to rank 0 at its end; 0 where it computes them alone."""
        return 0

    @abstractmethod
    def prefill_chunk(self, span: Span, seq: SequenceState) -> torch.Tensor | None:
        """One chunk of a prompt; a whole prompt is one chunk from 0."""

    @abstractmethod
    def decode(self, span: Span, seq: SequenceState) -> torch.Tensor | None:
        """One token of one sequence."""

    @abstractmethod
    def decode_batch(self, spans: Sequence[Span], seqs: Sequence[SequenceState]) -> torch.Tensor | None:
        """One token of each sequence, rows in the order given."""

    @abstractmethod
    def mixed_forward_batch(self, spans: Sequence[Span], seqs: Sequence[SequenceState]) -> torch.Tensor | None:
        """Decode rows and prompt chunks in one pass."""
