# SPDX-License-Identifier: MIT OR Apache-2.0
"""Part Logits: from logits to token ids on the device, and copies to the host."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class LogitsPart(ABC):
    """Rank 0 only; ties go to the first index everywhere."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Rows of the output head."""

    @abstractmethod
    def argmax_batch(self, logits_RV: torch.Tensor) -> list[int]:
        """The index of each row's largest value, the first one on a tie."""

    @abstractmethod
    def to_host(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """The logits as fp32 on the CPU."""
