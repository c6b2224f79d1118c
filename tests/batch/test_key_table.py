# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is known of many keys, compared with a dict."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.batch.key_table import MIN_SLOTS, KeyTable

KEYS = st.binary(max_size=3)
MOVES = st.lists(st.tuples(st.booleans(), KEYS, st.integers(0, 255)), max_size=60)


@given(MOVES)
def test_it_says_what_a_dict_would_say(moves: list[tuple[bool, bytes, int]]) -> None:
    table, expected = KeyTable(b"secret"), dict[bytes, int]()
    for is_added, key, flags in moves:
        if is_added:
            assert table.add(table.digest(key), flags) == (key not in expected)
            expected.setdefault(key, flags)
        else:
            assert table.mark(table.digest(key), flags) == expected.get(key)
            if key in expected:
                expected[key] |= flags
    assert len(table) == len(expected)
    assert all(table.mark(table.digest(key), 0) == flags for key, flags in expected.items())


def test_it_grows_and_keeps_what_it_knows(scale: int) -> None:
    table, count = KeyTable(), scale * 5 * MIN_SLOTS
    assert all(table.add(table.digest(b"%d" % number), number % 256) for number in range(count))
    assert len(table) == count
    assert all(table.mark(table.digest(b"%d" % number), 0) == number % 256 for number in range(count))
    assert not any(table.add(table.digest(b"%d" % number)) for number in range(count))


def test_a_key_that_is_not_known_cannot_be_marked() -> None:
    table = KeyTable()
    assert table.mark(table.digest(b"a"), 1) is None
    assert table.add(table.digest(b"a"))
    assert table.mark(table.digest(b"a"), 1) == 0


def test_a_key_takes_some_twenty_bytes_however_long_it_is() -> None:
    table = KeyTable()
    for number in range(10_000):
        table.add(table.digest(b"%d" % number + bytes(1000)))
    assert table.num_bytes / len(table) < 30
