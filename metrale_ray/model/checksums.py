# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Checksums`: sums over the weights that a rank holds, taken at the load and taken again, part by part.

Rules. A sum is of a chunk's bytes as 64-bit words, modulo 2**64: one flipped bit always changes it, and it is taken on
the tensor's own device about as fast as the memory can be read. It is no signature. Weights that all ranks hold are
replicated, and their sums are compared between the ranks too; the others are this rank's own: experts, and where
attention is split all but routers and norms. Parts are of equal numbers of chunks, of either kind for itself, so all
ranks name the same bytes by the same part.

Leaves out the KV cache, which changes with each step: `rows_sums` serves it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping

import torch

from metrale_ray.errors import MemoryDamaged
from metrale_ray.model.shard_plan import FINAL_NORM, HEAD
from metrale_ray.protocol.limits import DIGEST_BYTES

# Small enough to say where the damage is, and the sums of a shard take only a 2000th of it.
CHUNK_BYTES = 2**14
# A CPU reads it in 5 to 20 ms, a GPU in less than one; rank 0, whose shard is the largest, says how many parts.
PART_BYTES = 2**26
WORD_BYTES = 8
CHUNK_WORDS = CHUNK_BYTES // WORD_BYTES
# Of a layer's parameters. Norms of heads are not among them: a rank has those of its own heads.
ALWAYS_REPLICATED = ("input_layernorm", "post_attention_layernorm", "router")


def is_replicated(parameter: str, *, is_split: bool = False) -> bool:
    """Whether all ranks hold this parameter of a shard plan, whole. `is_split`: attention is split over them."""
    if is_split:
        return parameter == FINAL_NORM or parameter.rpartition(".")[2] in ALWAYS_REPLICATED
    return parameter not in (FINAL_NORM, HEAD) and ".experts." not in parameter


def num_chunks(tensor: torch.Tensor) -> int:
    """Chunks of a tensor, the last one possibly shorter."""
    return -(-tensor.nbytes // CHUNK_BYTES)


def chunk_sums(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """The sums of chunks `first`..`last`-1 of a tensor without gaps, int64 on its own device."""
    flat = tensor.view(-1).view(torch.uint8)
    num_whole = min(flat.numel() // CHUNK_BYTES, last)
    whole = flat[first * CHUNK_BYTES : max(first, num_whole) * CHUNK_BYTES].view(torch.int64)
    sums = whole.view(-1, CHUNK_WORDS).sum(dim=1)
    if num_whole == last:
        return sums
    rest = flat[num_whole * CHUNK_BYTES :].sum(dtype=torch.int64)
    return torch.cat([sums, rest[None]])


def rows_sums(rows: torch.Tensor) -> torch.Tensor:
    """The sum of each row of a tensor without gaps, int64 [rows]; a row has a whole number of words."""
    return rows.view(rows.shape[0], -1).view(torch.int64).sum(dim=1)


class Checksums:
    """Those of `weights`, none of which has gaps. Nothing is compared with the load before `note_loaded`.

    `is_split`: attention is split over the ranks.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], *, is_split: bool = False) -> None:
        of_all = {name for name in weights if is_replicated(name, is_split=is_split)}
        self._replicated = {name: tensor for name, tensor in weights.items() if name in of_all}
        self._own = {name: tensor for name, tensor in weights.items() if name not in of_all}
        self._loaded: dict[str, torch.Tensor] = {}

    def note_loaded(self, on_tensor: Callable[[], None] = lambda: None) -> None:
        """Take the sums of everything, to compare with later. `on_tensor` is called after each, as it may take long."""
        for name, tensor in (self._replicated | self._own).items():
            self._loaded[name] = chunk_sums(tensor, 0, num_chunks(tensor)).cpu()
            on_tensor()

    @property
    def num_parts(self) -> int:
        """Parts of about PART_BYTES; 1 when nothing is loaded."""
        num_bytes = sum(tensor.nbytes for tensors in (self._replicated, self._own) for tensor in tensors.values())
        return max(1, -(-num_bytes // PART_BYTES))

    def digest(self, part: int, num_parts: int) -> bytes:
        """8 bytes of the sums of one part of the replicated weights. Raises MemoryDamaged.

        The same part of the rank's own weights is compared with the load alone, as no other rank has them.
        """
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for name, first, sums in _sums_of_part(self._replicated, part, num_parts):
            self._compare(name, first, sums)
            digest.update(sums.numpy().data)
        for name, first, sums in _sums_of_part(self._own, part, num_parts):
            self._compare(name, first, sums)
        return digest.digest()

    def _compare(self, name: str, first: int, sums: torch.Tensor) -> None:
        loaded = self._loaded.get(name)
        if loaded is None:
            return
        differs = (loaded[first : first + len(sums)] != sums).nonzero()
        if len(differs):
            offset = (first + int(differs[0])) * CHUNK_BYTES
            raise MemoryDamaged(
                f"{name} no longer holds what was loaded: {len(differs)} of {len(sums)} chunks of {CHUNK_BYTES} bytes "
                f"differ, the first from byte {offset} on"
            )


def _sums_of_part(
    tensors: Mapping[str, torch.Tensor], part: int, num_parts: int
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """(name, first chunk, sums on the CPU) of each tensor that has chunks in the part."""
    total = sum(map(num_chunks, tensors.values()))
    start, end = total * part // num_parts, total * (part + 1) // num_parts
    before = 0  # chunks of the tensors so far
    for name, tensor in tensors.items():
        count = num_chunks(tensor)
        first, last = max(start - before, 0), min(end - before, count)
        if first < last:
            yield name, first, chunk_sums(tensor, first, last).cpu()
        before += count
