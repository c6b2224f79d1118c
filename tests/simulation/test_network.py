# SPDX-License-Identifier: MIT OR Apache-2.0
"""The simulated network: order, delays, how a peer's end is noticed, and each fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.baton import Baton, Process
from tests.simulation.end import End, Heartbeat
from tests.simulation.faults import Fault, FrameFault, Partition
from tests.simulation.network import Network, Weather

ADDRESS = "tcp://b:1"
HEARTBEAT = Heartbeat((3.0, 4.0))
LOUD = Weather(silent_share=0.0)
FRAMES = [bytes([number]) * 10 for number in range(6)]


@dataclass
class Pair:
    """Two connected ends, `a` which called and `b`, each in a process of its own."""

    baton: Baton
    network: Network
    processes: dict[str, Process]
    ends: dict[str, End]

    def sleep(self, seconds: float) -> None:
        self.baton.wait_until(lambda: False, seconds)

    def send(self, sender: str = "a", frames: Iterable[bytes] = FRAMES) -> None:
        for frame in frames:
            self.ends[sender].send(frame)

    def received(self, name: str = "b") -> list[bytes]:
        return list(self.ends[name].frames)


def with_pair(script: Callable[[Pair], object], *faults: Fault, seed: int = 0, weather: Weather = LOUD) -> Pair:
    """Run `script` with two connected ends."""
    baton = Baton(seed)
    network = Network(baton, seed, weather)
    pair = Pair(baton, network, {name: Process(name) for name in "ab"}, {})

    def accept(end: End, key: str) -> str | None:
        pair.ends["b"] = end
        return None

    def conductor() -> None:
        connect(pair, faults, accept)
        script(pair)

    error = baton.run({"conductor": conductor})["conductor"]
    if error is not None:
        raise error
    return pair


def connect(pair: Pair, faults: Iterable[Fault], accept: Callable[[End, str], str | None], life: int = 0) -> None:
    pair.network.begin_life(life, faults)
    pair.network.listen(pair.processes["b"], ADDRESS, "key of b", accept)
    pair.ends["a"] = pair.network.connect(pair.processes["a"], ADDRESS, "b", "key of a", "key of b", HEARTBEAT)
    pair.sleep(0.1)


@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(1, 5), max_size=6))
def test_frames_come_once_each_in_order_and_later_than_they_were_sent(seed: int, sizes: list[int]) -> None:
    def script(pair: Pair) -> None:
        sent = list[bytes]()
        for size in sizes:
            frames = [bytes([len(sent) + number]) for number in range(size)]
            sent += frames
            pair.send("a", frames)
            assert pair.received() != sent
            pair.sleep(0.001)
        pair.sleep(1.0)
        assert pair.received() == sent

    with_pair(script, seed=seed)


def test_what_was_sent_before_the_end_comes_before_it() -> None:
    def script(pair: Pair) -> None:
        pair.send()
        pair.ends["a"].close()
        pair.baton.wait_until(lambda: pair.ends["b"].lost is not None, 1.0)
        assert pair.received() == FRAMES

    pair = with_pair(script)
    assert pair.ends["b"].lost == "a has gone: its connection ended or its heartbeat is overdue"


@given(seed=st.integers(0, 200))
def test_a_killed_process_is_missed_soon_and_only_its_last_frames_may_be_lost(seed: int) -> None:
    def script(pair: Pair) -> None:
        pair.send()
        pair.processes["a"].kill()
        pair.send()
        pair.ends["a"].close()
        assert pair.baton.wait_until(lambda: pair.ends["b"].lost is not None, 0.1)
        assert pair.received() == FRAMES[: len(pair.received())]

    with_pair(script, seed=seed)


def test_some_deaths_lose_frames_and_others_do_not() -> None:
    def script(pair: Pair) -> None:
        pair.send()
        pair.processes["a"].kill()
        pair.sleep(1.0)

    counts = {len(with_pair(script, seed=seed).received()) for seed in range(40)}
    assert len(counts) > 3
    assert len(FRAMES) in counts


def test_a_machine_that_is_gone_is_missed_by_its_heartbeat() -> None:
    def script(pair: Pair) -> None:
        pair.processes["a"].kill()
        pair.sleep(2.9)
        assert pair.ends["b"].lost is None
        pair.sleep(1.1)
        assert pair.ends["b"].lost is not None

    with_pair(script, weather=Weather(silent_share=1.0))


def test_a_process_that_is_stopped_for_a_while_loses_nothing() -> None:
    def script(pair: Pair) -> None:
        pair.processes["b"].stop()
        pair.send()
        pair.sleep(2.9)
        pair.processes["b"].resume()
        pair.sleep(10.0)
        assert (pair.ends["a"].lost, pair.ends["b"].lost) == (None, None)
        assert pair.received() == FRAMES

    with_pair(script)


def test_a_process_that_is_stopped_for_long_is_lost_and_finds_its_connection_gone() -> None:
    def script(pair: Pair) -> None:
        pair.processes["b"].stop()
        pair.sleep(4.1)
        assert pair.ends["a"].lost is not None
        pair.send()
        pair.processes["b"].resume()
        pair.sleep(0.1)
        assert pair.ends["b"].lost is not None
        assert pair.received() == []

    with_pair(script)


@pytest.mark.parametrize("both", [True, False])
def test_a_short_partition_holds_frames_up_in_order(both: bool) -> None:
    def script(pair: Pair) -> None:
        pair.sleep(1.0)
        pair.send("a")
        pair.send("b")
        pair.sleep(1.0)
        assert pair.received("b") == []
        assert pair.received("a") == ([] if both else FRAMES)
        pair.sleep(1.5)
        assert pair.received("a") == pair.received("b") == FRAMES

    pair = with_pair(script, Partition(0, "a", "b", 0.5, 3.0, both))
    assert (pair.ends["a"].lost, pair.ends["b"].lost) == (None, None)
    assert len(pair.network.fired) == 1


@pytest.mark.parametrize("both", [True, False])
def test_a_long_partition_ends_the_connection_at_both_ends_whichever_way_it_cuts(both: bool) -> None:
    def script(pair: Pair) -> None:
        pair.sleep(1.0)
        pair.send("a")
        pair.sleep(10.0)
        assert pair.ends["a"].lost is not None
        assert pair.ends["b"].lost is not None
        assert pair.received() == []

    with_pair(script, Partition(0, "a", "b", 0.5, 9.0, both))


def damaged(kind: str, amount: float, number: int = 3) -> list[bytes]:
    """What comes of FRAMES when the third one suffers."""

    def script(pair: Pair) -> None:
        pair.send()
        pair.sleep(1.0)

    pair = with_pair(script, FrameFault(0, "a", "b", number, kind, amount))  # type: ignore[arg-type]  # the test's own
    assert len(pair.network.fired) == 1
    return pair.received()


def test_a_frame_may_be_lost_and_come_twice() -> None:
    assert damaged("lose", 0.0) == FRAMES[:2] + FRAMES[3:]
    assert damaged("duplicate", 0.0) == FRAMES[:3] + FRAMES[2:]


@pytest.mark.parametrize(("amount", "size"), [(0.0, 0), (0.5, 5), (1.0, 9)])
def test_a_frame_may_be_cut_but_never_to_its_whole_length(amount: float, size: int) -> None:
    assert damaged("truncate", amount) == [*FRAMES[:2], FRAMES[2][:size], *FRAMES[3:]]


@pytest.mark.parametrize("amount", [0.0, 0.31, 0.99, 1.0])
def test_one_bit_of_a_frame_may_change(amount: float) -> None:
    got = damaged("flip", amount)
    changed = int.from_bytes(got[2], "big") ^ int.from_bytes(FRAMES[2], "big")
    assert changed.bit_count() == 1
    assert got[:2] + got[3:] == FRAMES[:2] + FRAMES[3:]


def test_a_frame_may_be_late_and_those_behind_it_wait() -> None:
    def script(pair: Pair) -> None:
        pair.send()
        pair.sleep(1.0)
        assert pair.received() == FRAMES[:2]
        pair.sleep(1.0)
        assert pair.received() == FRAMES

    with_pair(script, FrameFault(0, "a", "b", 3, "delay", 1.5))


def test_a_connection_may_break_at_a_frame() -> None:
    def script(pair: Pair) -> None:
        pair.send()
        pair.sleep(0.1)
        assert (pair.ends["a"].lost is None, pair.ends["b"].lost is None) == (False, False)

    with_pair(script, FrameFault(0, "a", "b", 3, "close"))


def test_frames_of_an_earlier_life_may_come_again_and_not_those_of_this_one() -> None:
    fault = FrameFault(1, "a", "b", 2, "stale", 0.4)

    def accept_into(pair: Pair) -> Callable[[End, str], str | None]:
        def accept(end: End, key: str) -> str | None:
            pair.ends["b"] = end
            return None

        return accept

    def script(pair: Pair) -> None:
        pair.send()
        pair.sleep(1.0)
        connect(pair, [fault], accept_into(pair), life=1)
        pair.send("a", [b"x", b"y"])
        pair.sleep(1.0)

    pair = with_pair(script, FrameFault(0, "a", "b", 2, "stale", 0.4))
    assert pair.received() == [b"x", FRAMES[2], b"y"]
    assert pair.network.fired == [fault]


def test_a_stranger_and_a_caller_of_nobody_are_turned_away_with_the_reason() -> None:
    def script(pair: Pair) -> None:
        process, network = pair.processes["a"], pair.network
        ends = [
            network.connect(process, ADDRESS, "b", "key of a", "another key", HEARTBEAT),
            network.connect(process, "tcp://nobody:1", "b", "key of a", "key of b", HEARTBEAT),
        ]
        pair.sleep(0.1)
        reasons = [end.lost or "" for end in ends]
        assert "the handshake failed" in reasons[0]
        assert "refused or timed out" in reasons[1]

    with_pair(script)


def test_the_trace_is_the_same_under_one_seed_alone() -> None:
    def trace(seed: int) -> int:
        def script(pair: Pair) -> None:
            pair.send()
            pair.baton.wait_until(lambda: pair.received() == FRAMES)
            pair.send("b")

        return with_pair(script, seed=seed).network.trace

    assert trace(1) == trace(1)
    assert len({trace(seed) for seed in range(5)}) == 5
