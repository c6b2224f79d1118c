# SPDX-License-Identifier: MIT OR Apache-2.0
"""`NotedLogits`: a few raw logits of each row that gave a token, for a journal.

Rules: what is wanted is copied at once, as a step's logits are large and soon gone. On a GPU it stays there, so that
nobody waits for it here; on a CPU it is numpy that copies, which costs half of what torch does. It becomes numbers
when somebody asks, on whatever thread.

Shapes: R rows of logits, V the vocabulary, N rows that gave a token, P probes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class NotedLogits:
    """Of fp32 `logits_RV`: for each of `rows` the logit of its token, then those of the tokens of `probes`."""

    def __init__(self, logits_RV: Tensor, rows: Sequence[int], token_ids: Sequence[int], probes: range) -> None:
        source_RV: Any = logits_RV.numpy() if logits_RV.device.type == "cpu" else logits_RV
        self._chosen_N = source_RV[rows, token_ids]
        self._probed_NP = source_RV[:, probes.start : probes.stop : probes.step][rows]

    def values(self) -> list[tuple[float, ...]]:
        """1 + P numbers for each of the N rows."""
        chosen, probed = self._chosen_N.tolist(), self._probed_NP.tolist()
        return [(own, *others) for own, others in zip(chosen, probed, strict=True)]
