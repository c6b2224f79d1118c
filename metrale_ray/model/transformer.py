# SPDX-License-Identifier: MIT OR Apache-2.0
"""`TransformerModel`: the model contract for decoder families, with the experts spread over the ranks.

Attention, dense layers, embedding and output head are replicated, or split over the ranks as well (`dense_share`).

Every forward method is one packed pass over its spans. Rank 0 gives logits, the others None. The model keeps no
sequence of its own beside the contract's `SequenceState`: a sequence's rows are found through its block table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from metrale_ray.config import EngineConfig
from metrale_ray.errors import CommandRefused
from metrale_ray.model.attention.attention import Attention
from metrale_ray.model.attention.choose import choose_attention
from metrale_ray.model.checkpoint import Checkpoint
from metrale_ray.model.checksums import Checksums, rows_sums
from metrale_ray.model.collectives import Collectives
from metrale_ray.model.contract.agreement import MAX_SCRUB_ROWS
from metrale_ray.model.contract.ep import Ep
from metrale_ray.model.contract.model import Model
from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.model.contract.streams import Streams
from metrale_ray.model.decoder import Decoder
from metrale_ray.model.decoder_config import DecoderConfig
from metrale_ray.model.dense_share import dense_share, local_config, vocabulary_widths
from metrale_ray.model.kernels.choose import choose_kind, make_kernels
from metrale_ray.model.kv_cache import KvCache
from metrale_ray.model.layers.rotary import Rotary
from metrale_ray.model.layers.self_attention import join_head_norms
from metrale_ray.model.step import Step, asked_rows, plan_step
from metrale_ray.model.step_watch import StepWatch, hash_tensors
from metrale_ray.model.weights import Weights, load_weights, plan_weights, read_decoder_config
from metrale_ray.protocol.commands import Slot, Span
from metrale_ray.protocol.port import CommandPort

log = logging.getLogger(__name__)


class TransformerModel(Model):
    """One rank. Construction reads and checks the checkpoint's headers only; `load` reads the weights.

    `is_split`: attention is split over the ranks.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        rank: int,
        collectives: Collectives,
        port: CommandPort | None,
        device: torch.device,
        dtype: torch.dtype,
        *,
        is_split: bool = False,
    ) -> None:
        self.ep = Ep(port)
        self.streams = Streams(device)
        self.rank = rank
        self.device = device
        self.dtype = dtype
        self.decoder_config = read_decoder_config(checkpoint)
        self._tensors = checkpoint.tensors
        self.share = dense_share(self.decoder_config, rank, collectives.world, is_split=is_split)
        self._plan = plan_weights(checkpoint, self.decoder_config, rank, collectives.world, is_split=is_split)
        if is_split:
            collectives.plan_gather(vocabulary_widths(self.decoder_config, collectives.world))
        else:
            _warn_of_copies(self.decoder_config, rank, collectives.world)
        self._collectives = collectives
        self._block_size = config.block_size
        self._windows = frozenset(self.decoder_config.windows)
        self._rotary = Rotary(self.decoder_config.rope, self.decoder_config.head_dim, device, dtype)
        self._live: dict[Slot, SequenceState] = {}
        kind, reason = choose_kind(config.kernels, device, dtype, self.decoder_config)
        log.info("kernels: %s%s", kind, f" ({reason})" if reason else "")
        self._kernels = make_kernels(kind, device, dtype, config.quantization)
        self._choice = choose_attention(
            config.attention_backend, device, dtype, config.block_size, self.decoder_config.head_dim, kind
        )
        self._attention: Attention[Any] | None = None
        self._decoder: Decoder | None = None
        self._cache: KvCache | None = None
        self._weights: Weights = {}
        self._checksums = Checksums({})
        self._keeps_sums = config.scrub
        self._is_watched = False
        self._watch: StepWatch | None = None

    @torch.inference_mode()
    def load(self, num_blocks: int, on_progress: Callable[[int, int], None]) -> None:
        """Read this rank's shard and reserve the KV cache. Raises CheckpointError."""
        kernels, config = self._kernels, local_config(self.decoder_config, self.share)
        weights = load_weights(self._plan, self._tensors, self.device, self.dtype, on_progress, kernels.layout)
        join_head_norms(config, weights)
        cache = self._choice.cache(config, num_blocks, self._block_size, self.device, self.dtype)
        self._attention = self._choice.build(cache)
        is_tied = self._plan.is_tied
        self._decoder = Decoder(
            config, weights, self._attention, self._collectives, kernels, self.share, is_tied=is_tied
        )
        self._cache = cache
        self._weights = weights
        self._checksums = Checksums(weights, is_split=self.share.is_split)
        if self._keeps_sums:
            num_bytes = sum(tensor.nbytes for tensor in weights.values())
            self._checksums.note_loaded(lambda: on_progress(num_bytes, num_bytes))  # the load is waited for meanwhile

    @property
    def num_total_blocks(self) -> int:
        """The KV cache's capacity in blocks; 0 before `load`."""
        return self._cache.num_blocks if self._cache else 0

    def alloc_sequence(self, slot: Slot) -> SequenceState:
        """A fresh, empty sequence in `slot`. Raises CommandRefused when the slot is taken."""
        if slot in self._live:
            raise CommandRefused(f"slot {slot} holds a sequence already", slots=[slot])
        self._live[slot] = SequenceState(slot)
        return self._live[slot]

    def free_sequence(self, seq: SequenceState) -> None:
        """Forget the sequence. Raises CommandRefused when it was freed before."""
        if self._live.get(seq.slot) is not seq:
            raise CommandRefused(f"the sequence of slot {seq.slot} is free already", slots=[seq.slot])
        del self._live[seq.slot]

    def teardown(self) -> None:
        """Release weights, cache and sequences. Calling it twice is allowed."""
        self._decoder = None
        self._attention = None
        self._cache = None
        self._weights = {}
        self._checksums = Checksums({})
        self._watch = None
        self._live.clear()

    @property
    def weights(self) -> Weights:
        """This rank's parameters by name; empty before the load."""
        return self._weights

    @property
    def cache(self) -> KvCache | None:
        """This rank's keys and values; None before the load."""
        return self._cache

    @property
    def kv_block_size(self) -> int:
        """Tokens per KV block."""
        return self._block_size

    def num_reductions(self) -> int:
        """One for each layer with experts; where attention is split, after the embedding and twice in each layer."""
        config = self.decoder_config
        return 1 + 2 * config.num_layers if self.share.is_split else config.num_sparse_layers

    def num_gathered_rows(self, spans: Sequence[Span]) -> int:
        """See Forward: the rows that are asked for, where attention is split."""
        return sum(len(asked_rows(span)) for span in spans) if self.share.is_split else 0

    def prefill_chunk(self, span: Span, seq: SequenceState) -> torch.Tensor | None:
        """One chunk of a prompt."""
        return self._forward([span], [seq])

    def decode(self, span: Span, seq: SequenceState) -> torch.Tensor | None:
        """One token of one sequence."""
        return self._forward([span], [seq])

    def decode_batch(self, spans: Sequence[Span], seqs: Sequence[SequenceState]) -> torch.Tensor | None:
        """One token of each sequence, rows in the order given. Nothing is captured, so nothing is padded."""
        return self._forward(spans, seqs)

    def mixed_forward_batch(self, spans: Sequence[Span], seqs: Sequence[SequenceState]) -> torch.Tensor | None:
        """Decode rows and prompt chunks in one pass."""
        return self._forward(spans, seqs)

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return self.decoder_config.vocab_size

    def expert_tokens(self) -> list[int]:
        """For how many tokens each expert was chosen since the load."""
        decoder = self._decoder
        return decoder.expert_tokens() if decoder is not None else []

    def watch_step(self, is_watched: bool) -> None:
        """Whether the next step keeps its residual and routing."""
        self._is_watched, self._watch = is_watched, None

    def witness_of_step(self) -> dict[str, bytes]:
        """Digests of "residual" and, with experts, "routing" of the last step, if it was watched."""
        return self._watch.witness() if self._watch is not None else {}

    @property
    def num_scrub_parts(self) -> int:
        """So many that a part is some tens of megabytes."""
        return self._checksums.num_parts

    @torch.inference_mode()
    def weights_digest(self, part: int, num_parts: int) -> bytes:
        """Of one part of the weights that all ranks hold. Raises MemoryDamaged."""
        return self._checksums.digest(part, num_parts)

    @torch.inference_mode()
    def kv_digest(self, seq: SequenceState, start: int) -> bytes | None:
        """Of MAX_SCRUB_ROWS settled rows of `seq` from `start` on, in all layers: the sum of each row. None where
        attention is split."""
        if self._cache is None:
            raise CommandRefused("nothing is loaded yet")
        if self.share.is_split:
            return None
        cache = self._cache
        end = min(seq.length, start + MAX_SCRUB_ROWS)
        places = torch.tensor(cache.places(seq.block_table, start, end), dtype=torch.int64, device=self.device)
        layers = range(len(cache.layers))
        return hash_tensors([rows_sums(cache.gather(layer, places)) for layer in layers])

    def argmax_batch(self, logits_RV: torch.Tensor) -> list[int]:
        """The index of each row's largest value, the first one on a tie."""
        return [int(index) for index in logits_RV.argmax(dim=-1).tolist()]

    def to_host(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """The logits as fp32 on the CPU."""
        return logits_RV.to("cpu", torch.float32)

    @torch.inference_mode()
    def _forward(self, spans: Sequence[Span], seqs: Sequence[SequenceState]) -> torch.Tensor | None:
        if self._decoder is None or self._attention is None:
            raise CommandRefused("nothing is loaded yet")
        step = plan_step(spans, seqs, self._attention, self._rotary, self._windows, self.device)
        x_TH = self._watched_hidden(self._decoder, step) if self._is_watched else self._decoder.hidden(step)
        return self._decoder.logits(x_TH, step.logit_rows)

    def _watched_hidden(self, decoder: Decoder, step: Step) -> torch.Tensor:
        watch = StepWatch(step.last_rows, self.device)
        with decoder.watched(watch.note_routing):
            x_TH = decoder.hidden(step)
        watch.note_residual(x_TH)
        self._watch = watch
        return x_TH


def _warn_of_copies(config: DecoderConfig, rank: int, world: int) -> None:
    """Say once that more ranks do not help a model without experts."""
    if rank == 0 and world > 1 and config.num_sparse_layers == 0:
        log.warning(
            "%s has no experts to spread: each of the %d ranks holds the whole model and computes the same; "
            "ep_size 1 is as fast",
            config.architecture,
            world,
        )
