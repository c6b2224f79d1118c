# SPDX-License-Identifier: MIT OR Apache-2.0
"""Masks from llguidance's bits, against a plain reading of them, and whose memory they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.grammar.constraint import Vocabulary, _unpacked, masks
from metrale_ray.grammar.grammars import Grammars
from metrale_ray.grammar.texts import grammar_text, of_regex
from tests.fixtures.tokenizer import write_tokenizer

WORDS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3, max_size=3)


@given(rows=st.lists(WORDS, min_size=1, max_size=4), size=st.integers(1, 130), ends=st.sets(st.integers(0, 129)))
def test_each_id_has_its_bit_except_the_ends_and_those_that_have_none(
    rows: list[list[int]], size: int, ends: set[int]
) -> None:
    end_ids = np.array(sorted(token_id for token_id in ends if token_id < size), dtype=np.int64)
    found = _unpacked(Vocabulary(None, None, size, end_ids), np.array(rows, dtype=np.int32))
    bits = [sum((word % 2**32) << (32 * place) for place, word in enumerate(row)) for row in rows]
    plain = [[bool(of_row >> token_id & 1) and token_id not in ends for token_id in range(size)] for of_row in bits]
    assert found.dtype == np.bool_
    assert found.tolist() == plain


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_the_masks_of_a_step_are_rows_of_one_array_and_a_later_step_has_another(folder: Path) -> None:
    constraint = Grammars(folder, 320, [0]).compile(grammar_text(of_regex("a*")))
    several = [constraint.copy([0]) for _ in range(3)]
    first, later = masks(several), masks(several)
    bases = [mask.base for mask in first if not isinstance(mask, str) and mask.base is not None]
    assert len(bases) == 3
    assert all(base is bases[0] for base in bases)
    assert not any(np.shares_memory(one, other) for one in first for other in later)  # type: ignore[arg-type]
    assert [list(np.flatnonzero(mask)) for mask in first] == [list(np.flatnonzero(mask)) for mask in later]
