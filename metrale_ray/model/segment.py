# SPDX-License-Identifier: MIT OR Apache-2.0
"""A segment of memory that several processes of one host have mapped, and one process's end of it.

Rules. The memory has no name in any file system: the process that made it keeps it open only until the others have
mapped it, and they find it through that process's descriptor in /proc. So nothing is left of it when they end, however
they end. A number that nobody can guess tells it from any other one. What moves through it, and how, is the native
core's (src/shared.cpp).

A peer that ends is noticed by the kernel's word for it where there is one (pidfd_open), one that leaves by its own
word in the segment, and one that is stopped or hangs by `check_peers`, or at the deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import select
import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from metrale_ray.errors import LinkLost
from metrale_ray.model.collectives import name_lost_peer
from metrale_ray.native.library import BF16, FP16, FP32, function, library

FORMATS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}

# Of each rank's two slots. Payloads of any size go through them; from 64 KiB to 1 MiB it makes no difference.
SLOT_BYTES = 128 * 1024
# How long a wait spins before it sleeps, where every thread of the host's ranks has a core of its own. To be woken
# takes about as long.
SPIN_US = 50
# A first attempt keeps the interpreter's lock, which another thread may take for milliseconds once it is let go. It
# waits no longer than this, and is made with payloads that are moved in about that time.
HELD_US = 20
HELD_BYTES = 128 * 1024
# How long one wait lasts before the peers are looked at again.
SLICE_US = 50_000

_DONE, _NOT_YET, _LEFT = range(3)  # what the core's calls give


@dataclass(frozen=True, slots=True)
class SegmentAddress:
    """Where other processes of the host find a segment."""

    pid: int
    descriptor: int
    num_bytes: int
    token: int


class Segment:
    """Mapped memory for so many ranks. Raises OSError where it cannot be made or mapped."""

    def __init__(self, address: SegmentAddress, memory: mmap.mmap, is_ours: bool) -> None:
        self.address = address
        self._memory = memory
        self._is_open = is_ours

    @classmethod
    def make(cls, world: int, slot_bytes: int = SLOT_BYTES) -> Segment:
        """A new one, open for others until `seal`."""
        num_bytes = function("mr_shared_size", c_int64, c_int32, c_int64)(world, slot_bytes)
        if num_bytes <= 0:
            raise ValueError(f"no segment has {world} ranks with slots of {slot_bytes} bytes; slots are whole pages")
        descriptor = os.memfd_create("metrale-ray-sums")
        try:
            os.ftruncate(descriptor, num_bytes)
            memory = mmap.mmap(descriptor, num_bytes)
        except OSError:
            os.close(descriptor)
            raise
        segment = cls(SegmentAddress(os.getpid(), descriptor, num_bytes, secrets.randbits(64)), memory, True)
        format_segment = function("mr_shared_format", None, c_void_p, c_int32, c_int64, c_uint64)
        format_segment(segment.start, world, slot_bytes, segment.address.token)
        return segment

    @classmethod
    def find(cls, address: SegmentAddress) -> Segment:
        """Another process's, mapped into this one."""
        descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            if size != address.num_bytes:
                raise OSError(f"what process {address.pid} has open has {size} bytes, not {address.num_bytes}")
            return cls(address, mmap.mmap(descriptor, size), False)
        finally:
            os.close(descriptor)

    @property
    def start(self) -> int:
        """Its address in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def seal(self) -> None:
        """From now on nobody else can map it. Nothing, where another process made it."""
        if self._is_open:
            self._is_open = False
            os.close(self.address.descriptor)

    def close(self) -> None:
        """Unmap it. No end of it may be used any more. Calling it twice is allowed."""
        self.seal()
        self._memory.close()


class SegmentEnd:
    """One rank's end of a segment that `ranks` share, which are numbers of the whole group. Takes over the segment.

    `pids` are those of their processes. `spin_us`: before a wait sleeps. Raises OSError when the segment is not theirs.
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        ranks: Sequence[int],
        pids: Mapping[int, int],
        *,
        spin_us: int,
        timeout_s: float,
        check_peers: Callable[[], None],
    ) -> None:
        self._segment = segment
        self._rank = rank
        self._ranks = tuple(ranks)
        self._held_us = min(HELD_US, spin_us)
        self._timeout_s = timeout_s
        self._check_peers = check_peers
        self._is_broken = False  # an operation was given up: the others are elsewhere
        self._bind()
        address = segment.address
        index = self._ranks.index(rank)
        self._end = self._open(segment.start, address.num_bytes, address.token, index, len(ranks), spin_us)
        if not self._end:
            raise OSError(f"what process {address.pid} has open is another segment")
        self._peers = _Processes({peer: pid for peer, pid in pids.items() if peer != rank})

    def _bind(self) -> None:
        core: Any = library()
        arguments = (c_void_p, c_void_p, c_int64, c_int32, c_int64)
        self._open = function("mr_shared_open", c_void_p, c_void_p, c_int64, c_uint64, c_int32, c_int32, c_int64)
        self._sum = function("mr_shared_sum", c_int32, *arguments)
        self._sum_holding = ctypes.PyDLL(core._name, handle=core._handle)["mr_shared_sum"]
        self._sum_holding.restype, self._sum_holding.argtypes = c_int32, list(arguments)
        self._broadcast = function("mr_shared_broadcast", c_int32, c_void_p, c_int32, c_void_p, c_int64, c_int64)
        gathering = (c_void_p, c_int32, c_void_p, c_int64, c_void_p, c_int64)
        self._gather = function("mr_shared_gather", c_int32, *gathering)
        self._awaited = function("mr_shared_awaited", c_int32, c_void_p)
        self._close = function("mr_shared_close", None, c_void_p)

    def sum(self, flat: torch.Tensor) -> None:
        """Sum `flat` over the ranks in place: in rank order, in fp32, rounded once. Raises LinkLost."""
        end, at, num_items, kind = self._end, flat.data_ptr(), flat.numel(), FORMATS[flat.dtype]
        if self._is_broken or end is None:
            raise self._refusal()
        is_small = num_items * flat.itemsize <= HELD_BYTES
        if is_small and self._sum_holding(end, at, num_items, kind, self._held_us) == _DONE:
            return
        self._finish(lambda: self._sum(end, at, num_items, kind, SLICE_US))

    def broadcast(self, root: int, flat: torch.Tensor) -> None:
        """Give every rank what rank `root` has in `flat`. Raises LinkLost."""
        end, at, num_bytes = self._end, flat.data_ptr(), flat.nbytes
        if self._is_broken or end is None:
            raise self._refusal()
        index = self._ranks.index(root)
        self._finish(lambda: self._broadcast(end, index, at, num_bytes, SLICE_US))

    def gather(self, root: int, flat: torch.Tensor, into: torch.Tensor | None) -> None:
        """Give rank `root` what every rank has in `flat`, row by row `into` there; None elsewhere. Raises LinkLost."""
        end, at, num_bytes = self._end, flat.data_ptr(), flat.nbytes
        if self._is_broken or end is None:
            raise self._refusal()
        index, target = self._ranks.index(root), None if into is None else into.data_ptr()
        self._finish(lambda: self._gather(end, index, at, num_bytes, target, SLICE_US))

    def seal(self) -> None:
        """All have their ends: nobody else can map the segment from now on."""
        self._segment.seal()

    def close(self) -> None:
        """Tell the others and let the segment go. Calling it twice is allowed."""
        end, self._end = self._end, None
        if end is not None:
            self._close(end)
            self._segment.close()
            self._peers.close()

    def _finish(self, attempt: Callable[[], int]) -> None:
        """Make attempts until one is done, looking at the peers in between."""
        started = time.monotonic()
        self._is_broken = True
        while (outcome := attempt()) != _DONE:
            peer = self._ranks[self._awaited(self._end)]
            if outcome == _LEFT:
                self._lose(peer, "has left the group")
            self._check_peers()
            ended = self._peers.ended()
            if ended is not None:
                self._lose(ended, "has no process any more")
            if time.monotonic() - started >= self._timeout_s:
                raise LinkLost(f"rank {peer} did not come to a reduction within {self._timeout_s:g} s", rank=peer)
        self._is_broken = False

    def _lose(self, peer: int, why: str) -> None:
        name_lost_peer(self._check_peers)
        raise LinkLost(f"a reduction between the ranks failed: rank {peer} {why}", rank=peer)

    def _refusal(self) -> LinkLost:
        why = "the group of ranks was closed" if self._end is None else "a reduction was given up before"
        return LinkLost(why, rank=self._rank)


class _Processes:
    """Those of other ranks, by what the kernel tells of them; none where it does not."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._ranks: dict[int, int] = {}  # by descriptor
        self._gone: int | None = None
        self._poll = select.poll()
        for rank, pid in pids.items():
            self._watch(rank, pid)

    def ended(self) -> int | None:
        """A rank whose process has ended, None without."""
        if self._gone is None and self._ranks:
            self._gone = next((self._ranks[descriptor] for descriptor, _ in self._poll.poll(0)), None)
        return self._gone

    def close(self) -> None:
        """Look no more."""
        for descriptor in self._ranks:
            os.close(descriptor)
        self._ranks = {}

    def _watch(self, rank: int, pid: int) -> None:
        with contextlib.suppress(OSError):  # an older kernel, or a sandbox: the links know later
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._gone = rank
                return
            self._ranks[descriptor] = rank
            self._poll.register(descriptor, select.POLLIN)
