# SPDX-License-Identifier: MIT OR Apache-2.0
"""`join_ranks`: how the ranks of a group find which of them share a host, and by what way their sums go.

Ranks of one host sum through shared memory where each of them has the native core and computes on the CPU, and where
all of them can really map the same memory: containers on one machine may not. Else, and between hosts, by gloo; on GPUs
by NCCL. Every rank comes to the same choice, since it follows from what all of them said in the head's store, in three
rounds: where each one is, which memory each host's first rank has made, and whether each one has mapped it.

Rules. No wait is unbounded: a rank that does not come within the time is named in LinkLost, and nothing is left behind.
METRALE_COLLECTIVES=gloo on any rank keeps all of them from sharing memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from metrale_ray.control_groups import ROOT, first_line
from metrale_ray.errors import ConfigError
from metrale_ray.model.collectives import Collectives
from metrale_ray.model.meeting import Meeting
from metrale_ray.model.segment import SPIN_US, Segment, SegmentAddress, SegmentEnd
from metrale_ray.model.shared_memory import Hierarchical, SharedMemory
from metrale_ray.model.torch_distributed import TorchDistributed, TorchGroup
from metrale_ray.native.library import library, why_not

log = logging.getLogger(__name__)

COLLECTIVES_VAR = "METRALE_COLLECTIVES"
WAYS = ("auto", "gloo")
Sizes = tuple[int, int, int, int, torch.dtype]  # rank, world, most tokens of a step, hidden size


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank says of where it is. Ranks of the same `host` see each other's processes.

    `why_not`: why it cannot share memory, empty where it can. `cores` it may run on, and its number of `threads`.
    """

    host: str
    pid: int
    cores: tuple[int, ...]
    threads: int
    why_not: str
    is_gloo_asked_for: bool


@dataclass(frozen=True, slots=True)
class Way:
    """One rank's way to the others. `way` is "auto" or "gloo"; `host` names its host to the other ranks."""

    way: str
    host: str | None

    @classmethod
    def here(cls, environment: Mapping[str, str] | None = None) -> Way:
        """This process's. Raises ConfigError."""
        given = (os.environ if environment is None else environment).get(COLLECTIVES_VAR, "auto")
        if given not in WAYS:
            raise ConfigError(f"{COLLECTIVES_VAR} is {given!r}; allowed are {' and '.join(WAYS)}")
        return cls(given, this_host())


def this_host(root: Path = ROOT) -> str | None:
    """What processes have in common that can map each other's memory; None where the system does not tell.

    It is the boot, the numbering of processes, and the network: whatever is cut off from each other's network counts
    as several hosts, as it does for everything else between ranks.
    """
    boot = first_line(root / "proc/sys/kernel/random/boot_id")
    try:
        spaces = [os.readlink(root / f"proc/self/ns/{kind}") for kind in ("pid", "net")]
    except OSError:
        return None
    return " ".join([boot, *spaces]) if boot else None


def join_ranks(
    rank: int,
    world: int,
    max_tokens: int,
    hidden_size: int,
    dtype: torch.dtype,
    device: str,
    *,
    store: Any,
    host: str,
    timeout_s: float,
    check_peers: Callable[[], None],
    way: Way | None = None,
) -> Collectives:
    """One rank's end of the group. `store` is the head's, `host` this node's address, `way` by default this process's.

    `check_peers` raises LinkLost when a peer has gone. Raises LinkLost; ConfigError for a wrong METRALE_COLLECTIVES.
    """
    sizes = (rank, world, max_tokens, hidden_size, dtype)
    meeting = Meeting(rank, world, store, host, timeout_s, check_peers)
    collectives = _join(meeting, sizes, device, way)
    log.info("rank %d of %d: sums through %s", rank, world, collectives.way)
    return collectives


def _join(meeting: Meeting, sizes: Sizes, device: str, way: Way | None) -> Collectives:
    if device.startswith("cuda"):
        return TorchDistributed(*sizes, device, **meeting.for_torch())
    places = _tell_places(meeting, Way.here() if way is None else way)
    hosts, end = _share(meeting, places)
    with ExitStack() as undo:
        undo.callback(end.close if end is not None else _nothing)
        collectives: Collectives
        if len(hosts) == meeting.world:
            collectives = TorchDistributed(*sizes, device, **meeting.for_torch())
        elif len(hosts) == 1 and end is not None:
            collectives = SharedMemory(*sizes, end=end)
        else:
            collectives = _over_hosts(meeting, sizes, hosts, end)
        undo.pop_all()
    return collectives


def _nothing() -> None:
    """There is nothing to undo."""


def _over_hosts(meeting: Meeting, sizes: Sizes, hosts: Sequence[Sequence[int]], end: SegmentEnd | None) -> Hierarchical:
    leaders = [ranks[0] for ranks in hosts]
    leader = next(ranks[0] for ranks in hosts if meeting.rank in ranks)
    between = None
    if meeting.rank == leader:
        between = TorchGroup(leaders.index(leader), len(leaders), "cpu", **meeting.for_torch())
    return Hierarchical(*sizes, end=end, leaders=between, hosts=hosts)


def _tell_places(meeting: Meeting, way: Way) -> list[Place]:
    """Where every rank is."""
    here = Place(
        host=way.host or "",
        pid=os.getpid(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        threads=torch.get_num_threads(),
        why_not=_why_not(way),
        is_gloo_asked_for=way.way == "gloo",
    )
    meeting.say("place", asdict(here))
    return [Place(**said) for said in meeting.hear("place", range(meeting.world))]


def _why_not(way: Way) -> str:
    """Why this rank cannot share memory, empty where it can."""
    if way.host is None:
        return "the system does not tell which processes can share memory"
    return "" if library() is not None else f"there is no native core: {why_not()}"


def _hosts(places: Sequence[Place]) -> list[list[int]]:
    """The ranks by hosts, in the order of their first ranks; a rank that cannot share memory is alone."""
    found: dict[object, list[int]] = {}
    is_gloo = any(place.is_gloo_asked_for for place in places)
    for rank, place in enumerate(places):
        found.setdefault(rank if is_gloo or place.why_not else place.host, []).append(rank)
    return list(found.values())


def _share(meeting: Meeting, places: Sequence[Place]) -> tuple[list[list[int]], SegmentEnd | None]:
    """The ranks by hosts, as `_hosts`, those that cannot map their host's memory alone too; and this rank's end."""
    hosts = _hosts(places)
    mine = next(ranks for ranks in hosts if meeting.rank in ranks)
    end, trouble = None, ""
    with ExitStack() as undo:
        if len(mine) > 1:
            try:
                end = undo.enter_context(closing(_open_end(meeting, mine, places)))
            except OSError as error:
                trouble = str(error)
            meeting.say("trouble", trouble)
        apart = _hear_troubles(meeting, hosts)
        if mine in apart:
            return _parted(hosts, apart), None
        if end is not None:
            end.seal()
        undo.pop_all()
    return _parted(hosts, apart), end


def _hear_troubles(meeting: Meeting, hosts: Sequence[list[int]]) -> list[list[int]]:
    """The hosts of which a rank has not mapped the memory."""
    apart = []
    for ranks in hosts:
        if len(ranks) == 1:
            continue
        said = meeting.hear("trouble", ranks)
        troubles = [f"rank {rank}: {trouble}" for rank, trouble in zip(ranks, said, strict=True) if trouble]
        if troubles:
            apart.append(ranks)
        if troubles and meeting.rank == ranks[0]:
            log.warning("ranks %s are on one host and cannot share memory: %s", ranks, "; ".join(troubles))
    return apart


def _parted(hosts: Sequence[list[int]], apart: Sequence[list[int]]) -> list[list[int]]:
    """The hosts, with the ranks of those in `apart` alone, in the order of their first ranks."""
    return sorted(part for ranks in hosts for part in ([[rank] for rank in ranks] if ranks in apart else [ranks]))


def _open_end(meeting: Meeting, ranks: Sequence[int], places: Sequence[Place]) -> SegmentEnd:
    """This rank's end of the memory that the first of `ranks` makes. Raises OSError where there is none for it."""
    with ExitStack() as undo:
        segment = undo.enter_context(closing(_segment(meeting, ranks)))
        end = SegmentEnd(
            segment,
            meeting.rank,
            ranks,
            {rank: places[rank].pid for rank in ranks},
            spin_us=_spin_us([places[rank] for rank in ranks]),
            timeout_s=meeting.timeout_s,
            check_peers=meeting.check_peers,
        )
        undo.pop_all()
    return end


def _segment(meeting: Meeting, ranks: Sequence[int]) -> Segment:
    first = ranks[0]
    if meeting.rank != first:
        (said,) = meeting.hear("segment", [first])
        if said is None:
            raise OSError(f"rank {first} has made no memory to share")
        return Segment.find(SegmentAddress(**said))
    try:
        segment = Segment.make(len(ranks))
    except OSError:
        meeting.say("segment", None)
        raise
    with ExitStack() as undo:
        undo.callback(segment.close)
        meeting.say("segment", asdict(segment.address))
        undo.pop_all()
    return segment


def _spin_us(places: Iterable[Place]) -> int:
    """How long ranks on one host spin: not at all where their threads have not a core each."""
    cores: set[int] = set()
    num_threads = 0
    for place in places:
        cores.update(place.cores)
        num_threads += place.threads
    return SPIN_US if len(cores) >= num_threads else 0
