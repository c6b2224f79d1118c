# SPDX-License-Identifier: MIT OR Apache-2.0
"""`AllowedKeys`: which fronts may come in, by their public keys, and for how long.

Rules. A key is good from when it was allowed, while it has a session, and for UNUSED_S after; a front that comes later
has itself allowed again, as each does before it connects. So a front that was started anew, which has another key,
leaves none behind that stays good. A lasting key is the head's own driver's, which is allowed once, and stays. There
are never more than MAX_KEYS: of those that are not lasting and have no session, the one that has been so for longest
makes room.

What it leaves out: sessions, and the door that asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_FRONTS = 256
"""Sessions at one time: a front is a process, not a user."""

MAX_KEYS = 2 * MAX_FRONTS
"""Twice the sessions: a key that was just allowed is not crowded out before its front has come."""

UNUSED_S = 600.0
"""A front connects within seconds; the rest is for a machine or a network that is held up."""


@dataclass(slots=True)
class _Use:
    used_s: float  # when it was last allowed or had a session
    is_lasting: bool = False
    num_sessions: int = 0

    @property
    def is_needed(self) -> bool:
        return self.is_lasting or self.num_sessions > 0


class AllowedKeys:
    """Keys are their 32 bytes. All methods but `is_allowed` belong to one thread."""

    def __init__(
        self,
        *,
        max_keys: int = MAX_KEYS,
        unused_s: float = UNUSED_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_keys = max_keys
        self._unused_s = unused_s
        self._clock = clock
        self._uses: dict[bytes, _Use] = {}

    def __len__(self) -> int:
        """How many are kept, among them such as are good no longer and not yet forgotten."""
        return len(self._uses)

    def is_allowed(self, key: bytes) -> bool:
        """Whether its front may come in now. From any thread; never waits."""
        use = self._uses.get(key)
        return use is not None and not self._is_over(use)

    def allow(self, key: bytes, *, is_lasting: bool = False) -> None:
        """Make it good from now on; one that is lasting stays so."""
        use = self._uses.setdefault(key, _Use(self._clock()))
        use.used_s = self._clock()
        use.is_lasting |= is_lasting
        self._forget_unused()

    def disallow(self, key: bytes) -> None:
        """Forget it, also a lasting one. Its sessions are the caller's to end."""
        self._uses.pop(key, None)

    def opened(self, key: bytes) -> None:
        """A session of an allowed key has begun."""
        self._uses[key].num_sessions += 1

    def ended(self, key: bytes) -> None:
        """A session has ended; its key may be disallowed already."""
        use = self._uses.get(key)
        if use is not None:
            use.num_sessions -= 1
            use.used_s = self._clock()

    def _is_over(self, use: _Use) -> bool:
        return not use.is_needed and self._clock() - use.used_s > self._unused_s

    def _forget_unused(self) -> None:
        for key in [key for key, use in self._uses.items() if self._is_over(use)]:
            del self._uses[key]
        if len(self._uses) > self._max_keys:  # by one: each `allow` adds one at most
            unneeded = {key: use for key, use in self._uses.items() if not use.is_needed}
            del self._uses[min(unneeded, key=lambda key: unneeded[key].used_s)]
