# SPDX-License-Identifier: MIT OR Apache-2.0
"""`excess`: what a JSON text holds too much of, counted before it is parsed.

A parser holds up all threads of its process until it is done, and so every stream of the service. What it takes grows
with keys, lists, objects and texts, hardly with the length of a text, and little with numbers.

Rules. What stands in a text counts for nothing, such as the brackets of program code. Counting is many times faster
than parsing, for any bytes. Of bytes that are no JSON, what stands before their first mistake is counted right.

Leaves out: the length, which whoever reads has bounded, and the depth, at which parsers give up.
"""

from __future__ import annotations

MAX_KEYS = 2**15
"""Keys of all objects together. The parser looks for each among the others of its object."""

MAX_CONTAINERS = 2**16
"""Lists and objects."""

MAX_TEXTS = 2**17
"""Texts, keys included."""


def excess(data: bytes) -> str | None:
    """Of what `data` holds too much, as the end of a sentence; None when it may be parsed."""
    if not _exceeds(_counts(data), data.count(b'"')):
        return None
    if b"\\" in data:  # it stands in texts only; the first of two makes the second one plain
        data = data.replace(rb"\\", b"").replace(rb"\"", b"")
    num_quotes = data.count(b'"')
    if num_quotes > 2 * MAX_TEXTS:
        return _told(num_quotes // 2, "texts", MAX_TEXTS)
    return _exceeds(_counts(b"".join(data.split(b'"')[::2])), num_quotes)


def _counts(data: bytes) -> tuple[int, int]:
    """Keys and containers, where `data` has no texts; else no fewer than there are."""
    return data.count(b":"), data.count(b"[") + data.count(b"{")


def _exceeds(counts: tuple[int, int], num_quotes: int) -> str | None:
    num_keys, num_containers = counts
    if num_quotes > 2 * MAX_TEXTS:
        return _told(num_quotes // 2, "texts", MAX_TEXTS)
    if num_keys > MAX_KEYS:
        return _told(num_keys, "keys", MAX_KEYS)
    if num_containers > MAX_CONTAINERS:
        return _told(num_containers, "lists and objects", MAX_CONTAINERS)
    return None


def _told(count: int, what: str, most: int) -> str:
    return f"holds {count} {what}; at most {most} are allowed"
