# SPDX-License-Identifier: MIT OR Apache-2.0
"""Part ExpertLoad: what the experts had to do."""

from __future__ import annotations

from abc import ABC, abstractmethod


class ExpertLoad(ABC):
    """For the figures. From any thread."""

    @abstractmethod
    def expert_tokens(self) -> list[int]:
        """By expert: for how many tokens it was chosen since the load, over all layers and on whatever rank it is.

        Tokens of steps that failed are counted too. Empty before the load, and for a model without experts.
        """
