# SPDX-License-Identifier: MIT OR Apache-2.0
"""`RowLimit`: how many rows a step may have, after failures that no row explains.

Rules: a step that fails as a whole while all of its rows succeed in parts may have been too large for some rank, or
met a fault that has passed. After two of these the limit is halved, to 1 at the least. After a long run of steps that
succeed it is doubled again, up to where it began, and earlier failures are forgotten.
"""

from __future__ import annotations

UNEXPLAINED_FAILURES = 2
"""The first may be chance; the second is taken as a sign of the size."""

GOOD_STEPS = 256
"""Successes in a row before a larger step is tried: one that is still too large costs at most one step in so many."""


class RowLimit:
    """A number of rows, from 1 to `max_rows`, that failures lower and successes raise."""

    def __init__(self, max_rows: int) -> None:
        self.rows = max_rows
        self._max_rows = max_rows
        self._num_unexplained = 0
        self._num_good = 0

    def succeeded(self) -> None:
        """A step, or a part of one that had failed, succeeded."""
        self._num_good += 1
        if self._num_good >= GOOD_STEPS:
            self._num_good = self._num_unexplained = 0
            self.rows = min(2 * self.rows, self._max_rows)

    def failed(self) -> None:
        """A step failed, for whatever reason."""
        self._num_good = 0

    def unexplained(self) -> None:
        """The last failure turned out to be no row's fault."""
        self._num_unexplained += 1
        if self._num_unexplained >= UNEXPLAINED_FAILURES:
            self._num_unexplained = 0
            self.rows = max(1, self.rows // 2)
