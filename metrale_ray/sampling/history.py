# SPDX-License-Identifier: MIT OR Apache-2.0
"""`TokenHistory`: which tokens one sequence has had, as the penalties and the bad sequences need to know it.

Rules: one per sequence, made with its prompt, told of each token that is generated, in order; it outlives preemption.
A token costs one look-up and one addition, whatever the length, and a search among the prompt's when it is new; the
arrays are views of what is kept, never rebuilt. `DistinctTokens` of a prompt are found once for all its sequences.

What it leaves out: the sequence itself, which the scheduler has. Tokens of the prompt count as having occurred for
the repetition penalty alone, and never for the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from metrale_ray.sampling.token_params import MAX_BAD_SEQUENCE_TOKENS

_FIRST_ROOM = 64


class DistinctTokens:
    """The distinct tokens of one prompt, found when they are first asked for. Shared by any number of histories."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._token_ids: NDArray[np.int64] | None = None

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """In ascending order, int64 [D]. Not to be written to."""
        if self._token_ids is None:
            in_order = np.sort(np.asarray(self._prompt_token_ids, dtype=np.int64))
            # np.unique gives the same; it finds them by hashing, which takes ten times as long for a long prompt.
            is_new = np.ones(in_order.size, dtype=np.bool_)
            is_new[1:] = in_order[1:] != in_order[:-1]
            self._token_ids = in_order[is_new]
            self._prompt_token_ids = ()  # not needed any more
        return self._token_ids


class TokenHistory:
    """The distinct tokens of one sequence, and how often each was generated."""

    def __init__(self, prompt: Sequence[int] | DistinctTokens) -> None:
        """`prompt`: its token ids, or what is shared of them."""
        distinct = prompt if isinstance(prompt, DistinctTokens) else DistinctTokens(prompt)
        self._prompt_ids = distinct.token_ids
        self._size = self._prompt_ids.size
        self._ids = np.empty(self._size + _FIRST_ROOM, dtype=np.int64)
        self._ids[: self._size] = self._prompt_ids
        self._counts = np.zeros_like(self._ids)
        self._place: dict[int, int] = {}  # of each token that was generated
        self._tail: deque[int] = deque(maxlen=MAX_BAD_SEQUENCE_TOKENS - 1)

    def append(self, token_id: int) -> None:
        """Note one generated token."""
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = self._new_place(token_id)
        self._counts[place] += 1
        self._tail.append(token_id)

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The distinct tokens of prompt and output, int64 [H]. A view, which is good until the next `append`."""
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each of `token_ids` was generated, int64 [H]; 0 for one of the prompt alone. A view as well."""
        return self._counts[: self._size]

    @property
    def last_token_id(self) -> int | None:
        """The token generated last, or None before the first one."""
        return self._tail[-1] if self._tail else None

    def tail(self) -> tuple[int, ...]:
        """The tokens generated last, in order: as many as the longest bad sequence takes to be matched."""
        return tuple(self._tail)

    def _new_place(self, token_id: int) -> int:
        """The place of a token that was not generated before: its own in the prompt, or a new one behind all."""
        in_prompt = int(np.searchsorted(self._prompt_ids, token_id))
        if in_prompt < self._prompt_ids.size and self._prompt_ids[in_prompt] == token_id:
            return in_prompt
        place = self._size
        if place == self._ids.size:
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._size += 1
        return place
