# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Constraint`: one sequence's place in its grammar, and `masks`: what the sequences of a step may go on with.

Rules: it moves on only by tokens that were kept, so it may be asked for its mask again and again, and it survives
whatever happens to slots and steps. End ids are allowed exactly where the grammar may end. Ids that the tokenizer does
not know are never allowed. When a grammar passes its limits inside a step, or takes too long again and again, its
sequence has an error and the others have not.

Shapes: R rows, V the model's vocabulary, W the words of 32 bits in which llguidance writes a row.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metrale_ray.grammar.library import llguidance

MAX_MASK_THREADS = 8
"""Threads that compute the masks of one step. A mask takes well under a millisecond; more would only be in the way."""


SLOW_MASK_S = 0.02
"""CPU seconds of one mask that are too many: every sequence of the step waits for them. Usual ones take 0.001."""

MAX_SLOW_MASKS = 4
"""So many slow ones a sequence may have."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as llguidance has it, and what its constraints share. `size` is V.

    `end_ids`: the tokenizer's own ends below V (int64), which llguidance allows where it likes.
    """

    tokenizer: Any
    executor: Any
    size: int
    end_ids: NDArray[np.int64]


class Constraint:
    """For one sequence, which ends by one of `end_token_ids`; `goes_on`: it ends only where it must."""

    def __init__(
        self, matcher: Any, vocabulary: Vocabulary, end_token_ids: Iterable[int] = (), *, goes_on: bool = False
    ) -> None:
        self.matcher = matcher
        self.vocabulary = vocabulary
        self.end_ids = np.array(sorted(end_token_ids), dtype=np.int64)
        self.goes_on = goes_on
        self.is_suspect = False  # a batch that it was in took long
        self.num_slow = 0

    def copy(self, end_token_ids: Iterable[int], *, goes_on: bool = False) -> Constraint:
        """The same place in the grammar for another sequence."""
        return Constraint(self.matcher.deep_copy(), self.vocabulary, end_token_ids, goes_on=goes_on)

    def advance(self, token_id: int) -> None:
        """The sequence goes on with this token, which the mask allowed and which is no end."""
        self.matcher.consume_token(token_id)

    @property
    def may_end(self) -> bool:
        """Whether the text so far is whole."""
        return bool(self.matcher.is_accepting())

    @property
    def error(self) -> str | None:
        """Why it cannot go on, or None."""
        if self.num_slow > MAX_SLOW_MASKS:
            return f"{self.num_slow} of its tokens took more than {SLOW_MASK_S} s each; make it simpler"
        return str(self.matcher.get_error()).strip() if self.matcher.is_error() else None


def masks(constraints: Sequence[Constraint]) -> list[NDArray[np.bool_] | str]:
    """For each the tokens that it allows next (bool, [V]), or why it cannot go on.

    All of one vocabulary. In threads, without Python's lock: they take about as long as the slowest.
    """
    if not constraints:
        return []
    vocabulary = constraints[0].vocabulary
    bits_RW = np.zeros((len(constraints), (vocabulary.tokenizer.vocab_size + 31) // 32), dtype=np.int32)
    _fill(constraints, vocabulary, bits_RW)
    masks_RV = _unpacked(vocabulary, bits_RW)
    return [_with_ends(constraint, mask_V) for constraint, mask_V in zip(constraints, masks_RV, strict=True)]


def _fill(constraints: Sequence[Constraint], vocabulary: Vocabulary, bits_RW: NDArray[np.int32]) -> None:
    """Suspects each by itself, to see which one is slow; the others together."""
    together = [row for row, constraint in enumerate(constraints) if not constraint.is_suspect]
    alone = [row for row, constraint in enumerate(constraints) if constraint.is_suspect]
    if len(together) == 1:
        alone, together = alone + together, []
    for row in alone:
        _fill_alone(constraints[row], bits_RW[row])
    if not together:
        return
    started_s = time.perf_counter()
    matchers = [(constraints[row].matcher, row) for row in together]
    row_bytes = bits_RW.shape[1] * bits_RW.itemsize
    vocabulary.executor.unsafe_compute_mask_ptr(matchers, bits_RW.ctypes.data, row_bytes, len(constraints))
    if time.perf_counter() - started_s > SLOW_MASK_S:
        for row in together:
            constraints[row].is_suspect = True


def _fill_alone(constraint: Constraint, bits_W: NDArray[np.int32]) -> None:
    started_s = time.thread_time()
    constraint.matcher.unsafe_compute_mask_ptr(bits_W.ctypes.data, bits_W.nbytes)
    constraint.is_suspect = time.thread_time() - started_s > SLOW_MASK_S
    constraint.num_slow += constraint.is_suspect


def _unpacked(vocabulary: Vocabulary, bits_RW: NDArray[np.int32]) -> NDArray[np.bool_]:
    """A bool for each bit, of all rows at once (bool, [R, V]), without ends: each row allows its own."""
    bytes_RV = np.unpackbits(bits_RW.view(np.uint8), axis=1, count=vocabulary.size, bitorder="little")
    masks_RV = bytes_RV.view(np.bool_)  # they are 0 and 1
    masks_RV[:, vocabulary.end_ids] = False
    return masks_RV


def _with_ends(constraint: Constraint, mask_V: NDArray[np.bool_]) -> NDArray[np.bool_] | str:
    error = constraint.error
    if error is not None:
        return error
    mask_V[constraint.end_ids] = constraint.may_end and not (constraint.goes_on and mask_V.any())
    return mask_V


def new_vocabulary(tokenizer: Any, size: int, num_threads: int) -> Vocabulary:
    """For a model of `size` ids."""
    threads = max(1, min(MAX_MASK_THREADS, num_threads))
    ends = np.array([token_id for token_id in tokenizer.eos_tokens if token_id < size], dtype=np.int64)
    return Vocabulary(tokenizer, llguidance().LLExecutor(num_threads=threads), size, ends)
