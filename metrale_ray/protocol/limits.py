# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every bound of the wire, each with its reason.

Rules: the same bounds hold before packing and after unpacking, so what one side may send the other can always read.
What is not here: bounds that come from a model or a configuration (slots, positions, blocks), which each rank checks.
"""

from __future__ import annotations

U32_MAX = 2**32 - 1
"""Token ids, slots, block ids, positions, counts, command codes and ranks: no model or cache comes near it."""

I32_MIN, I32_MAX = -(2**31), 2**31 - 1
"""Priorities: the only integers that may be negative."""

U64_MAX = 2**64 - 1
"""Sequence numbers, seeds, bytes and microseconds. msgpack itself ends here."""

MAX_FRAME_BYTES = 16 * 2**20
"""One frame: the largest command (MAX_TOKENS and MAX_BLOCKS at 4 bytes each) fits twice."""

MAX_DEPTH = 8
"""Containers inside containers: commands need 2, an answer with candidates per token 5, and the rest is room."""

MAX_ELEMENTS = 2**17
"""Elements of all maps and arrays of one frame together. Long lists are `bin`, so a frame has few; this keeps a frame
of 16 million empty maps from becoming a gigabyte of objects."""

MAX_ARRAY_ELEMENTS = 4096
"""Elements of one array. The unpacker reserves this much for a header alone, so it stays small."""

MAX_MAP_ENTRIES = 4096
"""Entries of one map: a hello may carry one entry per checkpoint shard, and the largest models have some hundreds."""

MAX_STRING_BYTES = 2**20
"""One string in UTF-8. Each field has a smaller bound of its own."""

MAX_BIN_BYTES = 4 * 2**20
"""One `bin`: MAX_TOKENS numbers of 4 bytes."""

MAX_ROWS = 4096
"""Rows of one command, and slots that one error blames: far above any batch that fits a model's memory."""

MAX_TOKENS = 2**20
"""Tokens of one command: longer than any context that is prefilled in one step."""

MAX_BLOCKS = 2**20
"""New blocks of one command: one per token at the most."""

MAX_CODE_CHARS = 64
"""An error's stable code."""

MAX_ERROR_CHARS = 4096
"""An error's text; the sender cuts longer ones, because a reply must always arrive."""

MAX_REFUSAL_CHARS = 2**16
"""A welcome's refusal lists every difference of every rank; the sender cuts longer ones."""

MAX_KEY_CHARS = 256
"""The name of a hello's entry, such as a file name."""

MAX_VALUE_CHARS = 4096
"""The value of a hello's entry: a digest, a version, a list of settings."""

DIGEST_BYTES = 8
"""The digest of a rank's settled state; 64 bits tell ranks apart, they are not a signature."""
