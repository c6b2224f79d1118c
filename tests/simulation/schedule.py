# SPDX-License-Identifier: MIT OR Apache-2.0
"""The faults of one run, as plain data drawn from a seed, and what each of them may do to an engine's life.

Rules: a schedule is drawn apart from the workload, so that either may be cut down while the other stays. Each fault is
a frozen dataclass of numbers and texts; `to_map` and `from_map` are its JSON. Faults that never come to pass are
allowed: the group says which ones did.

What a life may end with is in `ends_of`, by the classes of the protocol page. A life in which no violent fault fires
must not fail at all.

What is left out, because the real wire cannot do it: bytes that change between a front and the head, and frames of
theirs that are lost alone, are repeated or come late from another life. TCP and the keys of both ends see to that; the
connection ends instead.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from metrale_ray.config import FaultSpec
from tests.simulation.faults import FrameFault, Partition, ProcessFault, SumFault
from tests.simulation.workload import ENTRIES, Life, Workload

HEARTBEAT_S = 4.0
"""After so long a peer that says nothing is lost: the real transport's limit."""

STEP_TIMEOUT_S = 20.0
"""A command's deadline in the simulation, in virtual seconds, which cost nothing."""

SHORT_STOP_S = 2.0
LONG_S = 3 * STEP_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class EngineFault:
    """A fault inside a rank's command, of those that the configuration can ask for; see FaultSpec."""

    life: int
    rank: int
    phase: str
    kind: str
    layer: int = 0
    first_token: int | None = None
    command: int | None = None
    blame: bool = False

    def spec(self) -> FaultSpec:
        """As the configuration takes it."""
        return FaultSpec(
            rank=self.rank,
            phase=self.phase,  # type: ignore[arg-type]  # checked by FaultSpec itself
            kind=self.kind,  # type: ignore[arg-type]
            layer=self.layer,
            first_token=self.first_token,
            command=self.command,
            blame=self.blame,
        )


Fault = FrameFault | Partition | ProcessFault | SumFault | EngineFault
KINDS: dict[str, type[Any]] = {
    "frame": FrameFault,
    "partition": Partition,
    "process": ProcessFault,
    "sum": SumFault,
    "engine": EngineFault,
}

RANK_AT_FAULT = "rank_at_fault"
"""The end by a rank that fails whatever it is given, which is a LinkLost of the head's own judgement."""

DIFFERENCES = ("diverge", "flip_token", "flip_block", "flip_length")
"""What makes one rank differ from the others in what it heard or holds, and is found at that very command."""

FINE = frozenset({"fine"})
LOST = frozenset({"fine", "link_lost", "start_error"})
OUT_OF_ORDER = frozenset({"fine", "link_lost", "session_error", "desync", "start_error"})
DAMAGED = frozenset({"fine", "link_lost", "session_error", "desync", "start_error", "handshake_error"})


def ends_of(fault: Fault) -> frozenset[str]:
    """The ends of a life that this fault may lead to: "fine", or the code of the error that ends it."""
    match fault:
        case FrameFault(kind="delay"):
            return LOST if fault.amount >= HEARTBEAT_S else FINE
        case FrameFault() if "front" in fault.sender + fault.receiver:
            return FINE  # a front that cannot be reached is that front's trouble
        case FrameFault(kind="lose" | "close" | "truncate"):
            return LOST
        case FrameFault(kind="duplicate" | "stale"):
            return OUT_OF_ORDER
        case FrameFault():
            return DAMAGED
        case Partition():
            fronts = "front" in fault.a + fault.b
            return FINE if fronts or fault.to_s - fault.from_s < HEARTBEAT_S / 2 else LOST
        case ProcessFault():
            return _ends_of_process(fault)
        case SumFault(kind="delay"):
            return LOST if fault.amount >= HEARTBEAT_S else FINE
        case SumFault():
            return LOST
        case EngineFault(kind="fail" | "poison"):
            return frozenset({"fine", RANK_AT_FAULT})
        case EngineFault():
            return frozenset({"fine", "desync"})


def _ends_of_process(fault: ProcessFault) -> frozenset[str]:
    if fault.process.startswith("front"):
        return FINE
    if fault.kind == "stop" and fault.for_s is not None and fault.for_s < HEARTBEAT_S / 2:
        return FINE
    return LOST | {"killed"} if fault.process == "head" else LOST


def blamed_ranks(fault: Fault) -> frozenset[int] | None:
    """The ranks that the head may name for an end by this fault; None: any, as all of them lose the head."""
    match fault:
        case FrameFault():
            return _ranks_of(fault.sender, fault.receiver)
        case Partition():
            return _ranks_of(fault.a, fault.b)
        case ProcessFault():
            return None if fault.process == "head" else _ranks_of(fault.process)
        case SumFault() | EngineFault():
            return None if fault.rank == 0 else frozenset({fault.rank})


def _ranks_of(*processes: str) -> frozenset[int]:
    return frozenset(int(process.removeprefix("rank ")) for process in processes if process.startswith("rank "))


def must_end(fault: Fault, ep_size: int) -> bool:
    """Whether a life in which this fault fired may not go on: a rank that differs must be found."""
    return isinstance(fault, EngineFault) and fault.kind in DIFFERENCES and ep_size > 1


def is_violent(fault: Fault) -> bool:
    """Whether it may end a life."""
    return ends_of(fault) != FINE


def draw_schedule(seed: int, workload: Workload) -> tuple[Fault, ...]:
    """The faults of a seed for this workload."""
    chance = random.Random(f"schedule {seed}")
    faults: list[Fault] = []
    for number, life in enumerate(workload.lives):
        is_last = number == len(workload.lives) - 1
        faults += _of_life(chance, number, life, workload.ep_size, is_last, workload.num_collectives)
    return tuple(faults)


def _of_life(
    chance: random.Random, number: int, life: Life, ep_size: int, is_last: bool, num_collectives: int
) -> list[Fault]:
    """A life that others follow mostly ends by violence."""
    weights = (5, 4, 5, 8) if is_last else (1, 1, 1, 6)
    kind = chance.choices(("none", "gentle", "engine", "violent"), weights)[0]
    gentle = [_gentle(chance, number, life, ep_size) for _ in range(chance.randint(1, 3))]
    if number > 0 and ep_size > 1 and chance.random() < 0.5:
        gentle.append(_violence_to_frame(chance, number, *_rank_link(chance, ep_size), "stale"))
        kind = "gentle"
    match kind:
        case "none":
            return []
        case "gentle":
            return gentle
        case "engine":
            extra = gentle if chance.random() < 0.3 else []
            return extra + [
                _engine(chance, number, life, ep_size, num_collectives) for _ in range(chance.randint(1, 2))
            ]
        case _:
            extra = gentle if chance.random() < 0.5 else []
            return extra + [_violent(chance, number, life, ep_size) for _ in range(chance.choice((1, 1, 2)))]


def _gentle(chance: random.Random, life: int, of_life: Life, ep_size: int) -> Fault:
    """What a healthy group must bear."""
    processes = _processes(of_life, ep_size)
    kinds = ["delay", "stop", "partition"] + ["sum"] * (ep_size > 1)
    match chance.choice(kinds):
        case "delay":
            sender, receiver = _link(chance, of_life, ep_size)
            return FrameFault(life, sender, receiver, _number(chance), "delay", _seconds(chance, 0.001, 1.5))
        case "stop":
            for_s = _seconds(chance, 0.01, SHORT_STOP_S * 0.9)
            return ProcessFault(life, chance.choice(processes), "stop", _turn(chance), None, for_s)
        case "partition":
            a, b = _link(chance, of_life, ep_size)
            from_s = _seconds(chance, 0.001, 1.0)
            return Partition(life, a, b, from_s, round(from_s + _seconds(chance, 0.01, 1.5), 4), chance.random() < 0.5)
        case _:
            rank = chance.randrange(ep_size)
            return SumFault(life, rank, _number(chance), "delay", _seconds(chance, 0.001, 1.5))


def _engine(chance: random.Random, life: int, of_life: Life, ep_size: int, num_collectives: int) -> EngineFault:
    asked = [ask.entry for ask in of_life.asks]
    of_sequence = chance.random() < 0.7
    weights = (10, 6, *((1,) * len(DIFFERENCES) if ep_size > 1 else (0,) * len(DIFFERENCES)))
    kind = chance.choices(("fail", "poison", *DIFFERENCES), weights)[0]
    phase = chance.choice(("validation", "before", "inside", "after", "reply"))
    first_token = ENTRIES[chance.choice(asked)].prompt[0] if of_sequence or kind == "poison" else None
    command = None
    if first_token is None or kind in DIFFERENCES or chance.random() < 0.3:
        command = 2 + int(chance.expovariate(1 / 12))
    return EngineFault(
        life,
        chance.randrange(ep_size),
        phase,
        kind,
        chance.randrange(num_collectives),
        first_token,
        command,
        chance.random() < 0.3,
    )


def _violent(chance: random.Random, life: int, of_life: Life, ep_size: int) -> Fault:
    """What may end a life, or a front's session."""
    kinds = ["process"] * 3 + ["front"] + (["frame"] * 6 + ["partition", "sum"] if ep_size > 1 else [])
    match chance.choice(kinds):
        case "process":
            return _violence_to_process(chance, life, _processes(of_life, ep_size))
        case "front":
            return _violence_to_front(chance, life, of_life)
        case "frame":
            sender, receiver = _rank_link(chance, ep_size)
            kinds = ["lose", "duplicate", "truncate", "flip", "close", "delay"]
            return _violence_to_frame(chance, life, sender, receiver, chance.choice(kinds))
        case "partition":
            a, b = _rank_link(chance, ep_size)
            from_s = _seconds(chance, 0.001, 1.0)
            return Partition(life, a, b, from_s, round(from_s + _seconds(chance, 5, LONG_S), 4), chance.random() < 0.5)
        case _:
            kind = chance.choice(("delay", "never", "kill"))
            rank = chance.randrange(0 if kind == "delay" else 1, ep_size)  # a head that hangs is nobody's to notice
            return SumFault(life, rank, _number(chance), kind, LONG_S if kind == "delay" else 0.0)


def _violence_to_process(chance: random.Random, life: int, processes: Sequence[str]) -> ProcessFault:
    process = chance.choice(processes)
    kind = chance.choice(("kill", "stop"))
    for_s = chance.choice((None, _seconds(chance, 5, LONG_S))) if kind == "stop" else None
    if chance.random() < 0.7:
        return ProcessFault(life, process, kind, _turn(chance), None, for_s)
    return ProcessFault(life, process, kind, None, _seconds(chance, 0.001, 1.0), for_s)


def _violence_to_front(chance: random.Random, life: int, of_life: Life) -> Fault:
    front = f"front {chance.randrange(of_life.num_fronts)}"
    ends = ("head", front) if chance.random() < 0.5 else (front, "head")
    kind = chance.choice(("close", "truncate"))
    return FrameFault(life, *ends, _number(chance), kind, chance.choice((0.0, 0.5, 0.9)))


def _violence_to_frame(chance: random.Random, life: int, sender: str, receiver: str, kind: str) -> FrameFault:
    """No bytes of hellos and welcomes change: what they say cannot be checked against anything."""
    least = 2 if kind == "flip" else 1
    amount = LONG_S if kind == "delay" else round(chance.random(), 4)
    return FrameFault(life, sender, receiver, max(least, _number(chance)), kind, amount)


def _processes(life: Life, ep_size: int) -> list[str]:
    ranks = [f"rank {rank}" for rank in range(1, ep_size)]
    return ["head", *ranks, *(f"front {front}" for front in range(life.num_fronts))]


def _link(chance: random.Random, life: Life, ep_size: int) -> tuple[str, str]:
    """Both ends of a link, the sender first."""
    ends = [process for process in _processes(life, ep_size) if process != "head"]
    other = chance.choice(ends)
    return ("head", other) if chance.random() < 0.5 else (other, "head")


def _rank_link(chance: random.Random, ep_size: int) -> tuple[str, str]:
    rank = f"rank {chance.randrange(1, ep_size)}"
    return ("head", rank) if chance.random() < 0.5 else (rank, "head")


def _number(chance: random.Random) -> int:
    """The number of a frame or of a sum: mostly an early one, since lives are short."""
    return 1 + int(chance.expovariate(1 / 15))


def _turn(chance: random.Random) -> int:
    return int(10 ** chance.uniform(1.5, 3.7))


def _seconds(chance: random.Random, least: float, most: float) -> float:
    """Short ones as often as long ones."""
    return round(least * (most / least) ** chance.random(), 4)


def to_map(fault: Fault) -> dict[str, Any]:
    """As JSON has it."""
    name = next(name for name, kind in KINDS.items() if isinstance(fault, kind))
    return {"fault": name, **asdict(fault)}


def from_map(data: Mapping[str, Any]) -> Fault:
    """The fault of `to_map`. Raises ValueError for what is none."""
    fields = dict(data)
    kind = KINDS.get(str(fields.pop("fault", None)))
    if kind is None:
        raise ValueError(f"a fault has the field `fault`, one of {', '.join(KINDS)}; this is {dict(data)}")
    try:
        return kind(**fields)  # type: ignore[no-any-return]
    except TypeError as error:
        raise ValueError(f"{dict(data)} is no fault: {error}") from error
