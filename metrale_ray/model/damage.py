# SPDX-License-Identifier: MIT OR Apache-2.0
"""Damage to one rank's memory, done on purpose so that tests see it found. Only `Faults` calls it.

Rules. One bit of one value, and nobody is told, so that what is found is found by the checks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from metrale_ray.config import FaultSpec
from metrale_ray.errors import ConfigError
from metrale_ray.model.checksums import is_replicated
from metrale_ray.model.slots import Slots
from metrale_ray.model.transformer import TransformerModel
from metrale_ray.protocol.commands import Slot

# A value below 2 becomes huge, infinite or no number by this bit; by the one below, most become nearly 0.
HIGHEST_EXPONENT_BITS = {
    torch.float32: (torch.int32, 30),
    torch.bfloat16: (torch.int16, 14),
    torch.float16: (torch.int16, 14),
    torch.int8: (torch.int8, 6),  # quantised: the highest bit below the sign
}


class Damage:
    """What can be damaged on one rank."""

    def __init__(self, slots: Slots, model: TransformerModel) -> None:
        self._slots = slots
        self._model = model
        self._deeds: dict[str, Callable[[FaultSpec, Sequence[Slot]], None]] = {
            "diverge": lambda spec, slots: self._slots.corrupt_digest(),
            "flip_token": lambda spec, slots: self._slots.flip_token(slots[-1]),
            "flip_block": lambda spec, slots: self._slots.flip_block(slots[-1]),
            "flip_length": lambda spec, slots: self._slots.flip_length(slots[-1]),
            "flip_weight": lambda spec, slots: flip_bit(self._weight(spec), high_bit=spec.bit),
            "flip_expert": lambda spec, slots: flip_bit(self._weight(spec)),
            "flip_kv": lambda spec, slots: self._flip_kv(slots[-1], spec.bit),
        }

    def do(self, spec: FaultSpec, slots: Sequence[Slot]) -> None:
        """The damage of `spec.kind`, for the last of `slots` where it is for a sequence. Raises ConfigError."""
        self._deeds[spec.kind](spec, slots)

    def _weight(self, spec: FaultSpec) -> torch.Tensor:
        """The tensor that the fault names, or the first of its kind in a layer."""
        weights = self._model.weights
        if spec.tensor is not None:
            if spec.tensor not in weights:
                raise ConfigError(f"rank {spec.rank} has no tensor {spec.tensor!r}; it has {', '.join(weights)}")
            return weights[spec.tensor]
        of_all = spec.kind == "flip_weight"
        names = (name for name in weights if name.startswith("layers.") and self._is_replicated(name) == of_all)
        return weights[next(names)]

    def _is_replicated(self, name: str) -> bool:
        return is_replicated(name, is_split=self._model.share.is_split)

    def _flip_kv(self, slot: Slot, bit: int) -> None:
        """The first value of the last settled token, in the first layer."""
        seq, cache = self._slots.sequence(slot), self._model.cache
        assert cache is not None, "a sequence has settled tokens"
        (place,) = cache.places(seq.block_table, seq.length - 1, seq.length)
        flip_bit(cache.first_value(0, place), high_bit=bit)


@torch.inference_mode()
def flip_bit(tensor: torch.Tensor, *, high_bit: int | None = None) -> None:
    """Flip a bit of the first item: the lowest, or the one `high_bit` places below the exponent's highest."""
    kind, highest = HIGHEST_EXPONENT_BITS[tensor.dtype]
    bit = 0 if high_bit is None else highest - high_bit
    tensor.view(-1)[:1].view(kind).bitwise_xor_(1 << bit)
