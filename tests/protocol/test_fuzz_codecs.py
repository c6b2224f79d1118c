# SPDX-License-Identifier: MIT OR Apache-2.0
"""The codec in plain Python, which msgpack falls back to, and the compiled one agree on every frame."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from msgpack import fallback

from metrale_ray.errors import FrameError
from metrale_ray.protocol import fields
from metrale_ray.protocol.codec import decode_command, decode_hello, decode_reply, decode_welcome
from tests.protocol.fuzzing import run_frames
from tests.protocol.mutations import Mutator
from tests.protocol.samples import golden_messages, to_bytes

SEED, NUM_SAMPLES = 7001, 4_000
FRAMES = [to_bytes(message, version) for version in (1, 2) for message in golden_messages(version).values()]
DECODERS: dict[str, Callable[..., Any]] = {
    "command": decode_command,
    "reply": decode_reply,
    "hello": decode_hello,
    "welcome": decode_welcome,
}


def kind_of(data: bytes) -> str:
    """The decoder for what the frame says it is, so that each reads as many valid frames as the others."""
    return next((name for name in DECODERS if name.encode() in data), "command")


def outcome(data: bytes) -> Any:
    """The message in `data`, or FrameError."""
    try:
        return DECODERS[kind_of(data)](data, rank=1)
    except FrameError:
        return FrameError


def test_both_codecs_read_the_same_messages_and_refuse_the_same_frames(
    monkeypatch: pytest.MonkeyPatch, scale: int
) -> None:
    mutator = Mutator(SEED, FRAMES)
    frames = [mutator.next() for _ in range(NUM_SAMPLES * scale)]
    compiled = [outcome(data) for data in frames]
    monkeypatch.setattr(fields.msgpack, "unpackb", fallback.unpackb)
    expected = iter(compiled)

    def read(data: bytes) -> str:
        found, other = outcome(data), next(expected)
        if found != other:
            raise AssertionError(f"the plain codec gives {found}, the compiled one {other}")
        return "refused" if found is FrameError else kind_of(data)

    tally = run_frames("both codecs", SEED, iter(frames), read, ())
    assert tally.num_frames == NUM_SAMPLES * scale
    assert min(tally.messages[name] for name in DECODERS) > NUM_SAMPLES // 100
    assert tally.messages["refused"] > NUM_SAMPLES // 4


WITHOUT_COMPILED = """
import msgpack
from msgpack import fallback
assert msgpack.Unpacker is fallback.Unpacker and msgpack.Packer is fallback.Packer
from tests.protocol.samples import from_bytes, golden_messages, to_bytes
from tests.protocol.write_golden import golden_path, read_golden
for version in (1, 2):
    for name, message in golden_messages(version).items():
        data = read_golden(golden_path(version, name))
        assert to_bytes(message, version) == data, name
        assert from_bytes(data, name) == message, name
"""


def test_a_process_that_has_only_the_plain_codec_writes_and_reads_the_golden_bytes() -> None:
    environment = {**os.environ, "MSGPACK_PUREPYTHON": "1"}
    result = subprocess.run([sys.executable, "-c", WITHOUT_COMPILED], env=environment, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr.decode()
