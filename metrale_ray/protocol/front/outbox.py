# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Outbox`: the outputs of one front's session that have not been read yet, sent or held, and the bounds on both.

Rules: what is posted together, or piles up while the front has no credit, goes out in as few frames as it fits in. A
front has credit while little of what was sent is unread; without credit its outputs are held here, in order, until it
reads. Only what is held may come to be too much: too many bytes, or for too long without anything being read.

Pure: no sockets, and time is counted in the caller's beats. It leaves out the session's other messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from metrale_ray.errors import SessionError
from metrale_ray.protocol.front.frames import MAX_OUTPUTS
from metrale_ray.protocol.front.messages import Output
from metrale_ray.sampling.logprobs import TokenLogprobs

CREDIT_FRAMES = 256
"""Unread frames of a front: some seconds of steps."""

CREDIT_BYTES = 16 * 2**20
"""Unread bytes of a front, which the socket keeps: far above what 256 frames of steps take, and full frames of log
probabilities reach it first. A front that has read everything may be sent one frame whatever its size."""

MAX_HELD_BYTES = 16 * 2**20
"""Held outputs of a front, as bytes on the wire; as objects they take up to ten times as much. It holds 100,000 ends
of requests: more than a front may have open."""

FRAME_BYTES = 2**20
"""Where a frame of several outputs ends: the front takes it in at once, and it is far below what a frame may have."""

_OUTPUT_BYTES = 128  # the keys and numbers of one output
_LOGPROBS_BYTES = 128  # the same of one map of log probabilities


class Outbox:
    """What one session owes and is owed: see the module."""

    def __init__(
        self,
        credit_frames: int = CREDIT_FRAMES,
        credit_bytes: int = CREDIT_BYTES,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self.num_sent = 0
        self.num_read = 0
        self._credit_frames = credit_frames
        self._credit_bytes = credit_bytes
        self._max_held_bytes = max_held_bytes
        self._held: deque[tuple[Output, int]] = deque()
        self._num_held_bytes = 0
        self._unread: deque[int] = deque()  # the bytes of each unread frame
        self._num_unread_bytes = 0
        self._num_beats = 0  # since the front read something, or since there is something to hold

    @property
    def holds_outputs(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._held)

    def add(self, outputs: Iterable[Output]) -> None:
        """Put outputs behind those that wait."""
        for output in outputs:
            size_bytes = max_bytes_of(output)
            self._held.append((output, size_bytes))
            self._num_held_bytes += size_bytes

    def next_frame(self) -> tuple[Output, ...]:
        """The outputs of the next frame, which are taken out: none without credit, or when nothing waits.

        The caller sends them and says so with `sent`, or drops the front.
        """
        if not self._has_credit():
            return ()
        outputs: list[Output] = []
        frame_bytes = 0
        while self._held and len(outputs) < MAX_OUTPUTS:
            output, size_bytes = self._held[0]
            if outputs and frame_bytes + size_bytes > FRAME_BYTES:
                break
            self._held.popleft()
            outputs.append(output)
            frame_bytes += size_bytes
        self._num_held_bytes -= frame_bytes
        return tuple(outputs)

    def sent(self, num_bytes: int) -> None:
        """The frame last given has left; it is unread from now on."""
        self.num_sent += 1
        self._unread.append(num_bytes)
        self._num_unread_bytes += num_bytes

    def read(self, num_frames: int) -> None:
        """The front has read `num_frames` frames in all. Raises SessionError if that cannot be."""
        if not self.num_read <= num_frames <= self.num_sent:
            raise SessionError(f"Read says {num_frames} frames; {self.num_read} were read and {self.num_sent} sent")
        for _ in range(num_frames - self.num_read):
            self._num_unread_bytes -= self._unread.popleft()
            self._num_beats = 0
        self.num_read = num_frames

    def beat(self, max_beats: int) -> bool:
        """One beat has passed. Whether outputs were held for more than `max_beats` without anything being read."""
        self._num_beats = self._num_beats + 1 if self._held else 0
        return self._num_beats > max_beats

    def overflow(self) -> str | None:
        """What is too much about the held outputs, or None. Asked when all was sent that there is credit for."""
        if self._num_held_bytes <= self._max_held_bytes:
            return None
        return (
            f"it has {len(self._unread)} frames unread and {len(self._held)} outputs waiting behind them, which take "
            f"more than {self._max_held_bytes} bytes"
        )

    def _has_credit(self) -> bool:
        if not self._unread:
            return True
        return len(self._unread) < self._credit_frames and self._num_unread_bytes < self._credit_bytes


def max_bytes_of(output: Output) -> int:
    """What `output` takes in a frame, at most."""
    size_bytes = _OUTPUT_BYTES + 4 * len(output.token_ids)
    if output.error is not None:
        size_bytes += _OUTPUT_BYTES + 4 * sum(map(len, output.error))
    return size_bytes + _max_bytes_of_logprobs(output.logprobs) + _max_bytes_of_logprobs(output.prompt_logprobs)


def _max_bytes_of_logprobs(logprobs: Sequence[TokenLogprobs]) -> int:
    if not logprobs:
        return 0
    return _LOGPROBS_BYTES + sum(20 + 12 * len(each.top_ids) for each in logprobs)
