# SPDX-License-Identifier: MIT OR Apache-2.0
"""A model without arithmetic, and a worker that answers from within the head's process: what is left is the head.

Rules: everything but the forward is the real thing: commands are framed, checked, staged, witnessed and judged. The
worker's own time is kept apart, since a worker has a process of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from metrale_ray.model.collectives import OneRank
from metrale_ray.model.contract.ep import Ep
from metrale_ray.model.contract.model import Model
from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.model.contract.streams import Streams
from metrale_ray.model.damage import Damage
from metrale_ray.model.execute import Replica
from metrale_ray.model.faults import Faults
from metrale_ray.model.slot_checks import SlotLimits
from metrale_ray.model.slots import Slots
from metrale_ray.protocol.codec import decode_command, encode_hello, encode_reply
from metrale_ray.protocol.commands import Hello, Rank, Slot, Span
from metrale_ray.protocol.port import CommandPort
from metrale_ray.protocol.versions import ProtocolVersion

HIDDEN_SIZE = 1


class NullModel(Model):
    """Gives the same logits for every row, on rank 0 alone."""

    def __init__(self, rank: int, port: CommandPort | None, vocab_size: int, most_rows: int, block_size: int) -> None:
        self.ep = Ep(port)
        self.streams = Streams(torch.device("cpu"))
        self._rank = rank
        self._block_size = block_size
        self._num_blocks = 0
        self._logits_RV = torch.randn(most_rows, vocab_size, generator=torch.Generator().manual_seed(0))

    def load(self, num_blocks: int, on_progress: Callable[[int, int], None]) -> None:
        """Nothing but the number of blocks."""
        self._num_blocks = num_blocks

    @property
    def num_total_blocks(self) -> int:
        """See Lifecycle."""
        return self._num_blocks

    def alloc_sequence(self, slot: Slot) -> SequenceState:
        """See Lifecycle."""
        return SequenceState(slot)

    def free_sequence(self, seq: SequenceState) -> None:
        """Nothing belongs to it."""

    def teardown(self) -> None:
        """There is nothing."""

    @property
    def kv_block_size(self) -> int:
        """See Forward."""
        return self._block_size

    def num_reductions(self) -> int:
        """None: there are no experts."""
        return 0

    def prefill_chunk(self, span: Span, seq: SequenceState) -> torch.Tensor | None:
        """See Forward."""
        return self._logits(1)

    def decode(self, span: Span, seq: SequenceState) -> torch.Tensor | None:
        """See Forward."""
        return self._logits(1)

    def decode_batch(self, spans: Sequence[Span], seqs: Sequence[SequenceState]) -> torch.Tensor | None:
        """See Forward."""
        return self._logits(len(spans))

    def mixed_forward_batch(self, spans: Sequence[Span], seqs: Sequence[SequenceState]) -> torch.Tensor | None:
        """See Forward."""
        return self._logits(len(spans))

    @property
    def vocab_size(self) -> int:
        """See LogitsPart."""
        return self._logits_RV.shape[1]

    def argmax_batch(self, logits_RV: torch.Tensor) -> list[int]:
        """See LogitsPart."""
        return [int(index) for index in logits_RV.argmax(dim=-1).tolist()]

    def to_host(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """They are there."""
        return logits_RV

    def expert_tokens(self) -> list[int]:
        """There are no experts."""
        return []

    def watch_step(self, is_watched: bool) -> None:
        """Nothing is computed that could be watched."""

    def witness_of_step(self) -> dict[str, bytes]:
        """See watch_step."""
        return {}

    @property
    def num_scrub_parts(self) -> int:
        """See Agreement."""
        return 1

    def weights_digest(self, part: int, num_parts: int) -> bytes:
        """Of nothing."""
        return bytes(8)

    def kv_digest(self, seq: SequenceState, start: int) -> bytes:
        """Of nothing."""
        return bytes(8)

    def _logits(self, num_rows: int) -> torch.Tensor | None:
        return self._logits_RV[:num_rows] if self._rank == 0 else None


def null_replica(rank: int, port: CommandPort | None, vocab_size: int, limits: SlotLimits) -> tuple[Replica, NullModel]:
    """One rank's replica of it."""
    model = NullModel(rank, port, vocab_size, limits.max_batch_size, limits.block_size)
    slots = Slots(limits, model.alloc_sequence, model.free_sequence)
    collectives = OneRank(rank, 1, limits.max_num_batched_tokens, HIDDEN_SIZE, torch.float32, "cpu")
    replica = Replica(rank, model, slots, collectives, Faults((), rank, Damage(slots, model)), lambda *told: None)
    return replica, model


class AnsweringTransport:
    """A worker behind the head's end of a link: it carries out each command as it is sent. `worker_s` is its time."""

    def __init__(self, replica: Replica, version: ProtocolVersion) -> None:
        self._replica = replica
        self._answers = deque([encode_hello(Hello(Rank(replica.rank), version, {}, {}, 1))])
        self._is_welcome = False
        self.worker_s = 0.0

    def send(self, data: bytes) -> None:
        """The welcome, and then commands."""
        began_s = time.perf_counter()
        if self._is_welcome:
            self._answers.append(encode_reply(self._replica.run(decode_command(data))))
        self._is_welcome = True
        self.worker_s += time.perf_counter() - began_s

    def receive(self, timeout_s: float | None) -> bytes:
        """The next answer, which is there."""
        return self._answers.popleft()

    def lost(self) -> str | None:
        """Never."""
        return None

    def close(self) -> None:
        """There is no connection."""
