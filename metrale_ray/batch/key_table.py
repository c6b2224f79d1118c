# SPDX-License-Identifier: MIT OR Apache-2.0
"""`KeyTable`: what is known of millions of keys, in some twenty bytes for each, however long they are.

Rules. Of a key only 64 bits of a keyed hash are kept, and a byte of flags. Two keys may thus be taken for one: once in
a hundred thousand tables of ten million keys. The hash's key is another one in each process, so that nobody can choose
such keys, and the next run tells them apart.

Leaves out: removing a key, and finding out which keys there are.
"""

from __future__ import annotations

import os
from array import array
from hashlib import blake2b

MIN_SLOTS = 1024
MAX_LOAD = 0.6
"""Keys per slot; fuller tables are searched longer."""


class KeyTable:
    """Flags (0 to 255) by key. `secret`: what the hash depends on besides; random where none is given."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = os.urandom(16) if secret is None else secret
        self._digests = array("Q", bytes(8 * MIN_SLOTS))  # 0 is an empty slot
        self._flags = bytearray(MIN_SLOTS)
        self._num_keys = 0

    def __len__(self) -> int:
        return self._num_keys

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return len(self._digests) * (self._digests.itemsize + 1)

    def digest(self, key: bytes) -> int:
        """By which all else here knows the key."""
        return int.from_bytes(blake2b(key, digest_size=8, key=self._secret).digest(), "little") or 1

    def add(self, digest: int, flags: int = 0) -> bool:
        """Whether the key is new, and now known with these flags. The flags of a known one stay."""
        if self._num_keys >= MAX_LOAD * len(self._digests):
            self._grow()
        slot = self._slot(digest)
        if self._digests[slot]:
            return False
        self._digests[slot], self._flags[slot] = digest, flags
        self._num_keys += 1
        return True

    def mark(self, digest: int, flags: int) -> int | None:
        """Set these flags too, and give those that were set before; None for a key that is not known."""
        slot = self._slot(digest)
        if not self._digests[slot]:
            return None
        before = self._flags[slot]
        self._flags[slot] |= flags
        return before

    def _slot(self, digest: int) -> int:
        """Where the digest is, or the empty slot where it belongs."""
        digests, mask = self._digests, len(self._digests) - 1
        slot = digest & mask
        while digests[slot] not in (0, digest):
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        digests, flags = self._digests, self._flags
        self._digests, self._flags = array("Q", bytes(16 * len(digests))), bytearray(2 * len(digests))
        for place, digest in enumerate(digests):
            if digest:
                slot = self._slot(digest)
                self._digests[slot], self._flags[slot] = digest, flags[place]
