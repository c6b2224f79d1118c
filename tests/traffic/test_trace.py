# SPDX-License-Identifier: MIT OR Apache-2.0
"""A recording is read in order of time, gzipped or not, and what is wrong in it is named with its line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from metrale_ray.errors import UserError
from metrale_ray.traffic.trace import Arrival, read_trace

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROWS = "2023-11-16 18:17:04.0319600,3180,8\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05,110,0\n"


def write(folder: Path, text: str) -> str:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_arrivals_count_from_the_earliest_in_order_of_time(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path, HEAD + ROWS))
    assert [round(arrival.at_s, 6) for arrival in found] == [0.0, 0.052, 1.02004]
    assert [(arrival.num_input, arrival.num_output) for arrival in found] == [(4808, 10), (3180, 8), (110, 1)]


def test_a_gzipped_file_is_the_same_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(gzip.compress((HEAD + ROWS).encode()))
    assert read_trace(str(tmp_path / "packed")) == read_trace(write(tmp_path, HEAD + ROWS))


def test_further_columns_and_their_order_do_not_matter(tmp_path: Path) -> None:
    text = "GeneratedTokens,Kind,ContextTokens,TIMESTAMP\n5,code,7,2024-05-10T00:00:00+00:00\n"
    assert read_trace(write(tmp_path, text)) == [Arrival(0.0, 7, 5)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,Context\n", "no column ContextTokens, GeneratedTokens"),
        (HEAD, "has no requests"),
        (HEAD + "2023-11-16 18:17:05,1,2\nyesterday,1,2\n", "csv:3: TIMESTAMP is 'yesterday'"),
        (HEAD + "2023-11-16 18:17:05,1\n", "csv:2: GeneratedTokens is ''"),
        (HEAD + "2023-11-16 18:17:05,-4,2\n", "csv:2: ContextTokens is '-4'"),
        (HEAD + "2023-11-16 18:17:05,1e3,2\n", "ContextTokens is '1e3'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        read_trace(write(tmp_path, text))
    assert said in caught.value.message


def test_a_file_that_is_missing_damaged_or_no_text_is_the_callers_mistake(tmp_path: Path) -> None:
    packed = gzip.compress((HEAD + ROWS).encode())
    contents = {"cut": packed[:40], "damaged": packed[:30] + b"\xff\xff" + packed[32:], "bytes": b"\xff\xfe\x00\xd8"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name in (*contents, "missing", "."):
        with pytest.raises(UserError, match="trace"):
            read_trace(str(tmp_path / name))
