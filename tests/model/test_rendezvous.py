# SPDX-License-Identifier: MIT OR Apache-2.0
"""By what way the ranks' sums go: all choose the same, whoever cannot share memory, and nobody waits for good."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from metrale_ray.errors import ConfigError, LinkLost
from metrale_ray.model.collectives import Collectives
from metrale_ray.model.rendezvous import Place, Way, _hosts, _spin_us, join_ranks, this_host
from metrale_ray.model.segment import SPIN_US, Segment
from metrale_ray.model.torch_distributed import host_store, join_store
from metrale_ray.native.library import library, why_not

HOST = "127.0.0.1"
PLACE = Place(host="a", pid=1, cores=(0, 1), threads=1, why_not="", is_gloo_asked_for=False)
needs_core = pytest.mark.skipif(library() is None, reason=why_not())


def join(rank: int, world: int, store: Any, way: Way, **changes: Any) -> Collectives:
    limits = {"timeout_s": 20.0, "check_peers": lambda: None, **changes}
    return join_ranks(rank, world, 4, 8, torch.float32, "cpu", store=store, host=HOST, way=way, **limits)


def join_as_threads(ways: Sequence[Way], each: Callable[[Collectives], Any]) -> list[Any]:
    """Every rank in a thread of its own; what `each` gives for it, or its error."""
    store, port = host_store(HOST, 20.0)
    found: list[Any] = [None] * len(ways)

    def run(rank: int) -> None:
        try:
            collectives = join(rank, len(ways), store if rank == 0 else join_store(HOST, port, 20.0), ways[rank])
            found[rank] = each(collectives)
            collectives.close()
        except Exception as error:  # noqa: BLE001  told to the test
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ways))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def way_and_sum(collectives: Collectives) -> tuple[str, float]:
    collectives.begin(2, 1)
    collectives.payload().fill_(collectives.rank + 1.0)
    return collectives.way, float(collectives.all_reduce().mean())


def descriptors() -> list[str]:
    return [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_there(name)]


def _is_there(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


def memory_left() -> list[str]:
    maps = Path("/proc/self/maps").read_text()
    return [found for found in [*descriptors(), *maps.splitlines()] if "metrale-ray-sums" in found]


@needs_core
def test_ranks_on_one_host_share_memory_and_nothing_of_it_has_a_name_or_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="metrale_ray")
    found = join_as_threads([Way("auto", "a")] * 2, lambda c: (way_and_sum(c), "(deleted)" in memory_left()[0]))
    assert found == [(("shared memory", 3.0), True)] * 2
    assert not memory_left()
    assert "rank 0 of 2: sums through shared memory" in caplog.messages


@needs_core
def test_a_rank_that_cannot_map_the_memory_makes_all_of_its_host_go_by_gloo_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def not_here(address: object) -> Segment:
        raise PermissionError(13, "Permission denied", "/proc/1/fd/9")

    monkeypatch.setattr(Segment, "find", not_here)
    assert join_as_threads([Way("auto", "a")] * 2, way_and_sum) == [("gloo", 3.0)] * 2
    assert not memory_left()
    (told,) = [text for text in caplog.messages if "cannot share memory" in text]
    assert "ranks [0, 1] are on one host" in told
    assert "rank 1: [Errno 13] Permission denied: '/proc/1/fd/9'" in told


@needs_core
def test_memory_that_cannot_be_made_makes_all_of_its_host_go_by_gloo(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def cannot(*arguments: object) -> Segment:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(Segment, "make", cannot)
    assert join_as_threads([Way("auto", "a")] * 2, way_and_sum) == [("gloo", 3.0)] * 2
    (told,) = [text for text in caplog.messages if "cannot share memory" in text]
    assert "rank 0: [Errno 12] Cannot allocate memory; rank 1: rank 0 has made no memory to share" in told


def test_one_rank_that_is_told_to_go_by_gloo_takes_all_others_with_it() -> None:
    assert join_as_threads([Way("auto", "a"), Way("gloo", "a")], way_and_sum) == [("gloo", 3.0)] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_peer_does_not_come_says_whom_it_waited_for(rank: int) -> None:
    store, _ = host_store(HOST, 20.0)
    with pytest.raises(
        LinkLost, match=rf"rank {rank} at 127\.0\.0\.1 could not join .* within 0\.2 s: nothing came"
    ) as e:
        join(rank, 2, store, Way("auto", "a"), timeout_s=0.2)
    assert e.value.rank == 1 - rank


@needs_core
def test_a_rank_that_goes_after_it_said_where_it_is_leaves_no_memory_behind() -> None:
    store, _ = host_store(HOST, 20.0)
    said = (
        f'{{"host": "a", "pid": {os.getpid()}, "cores": [0], "threads": 1, "why_not": "", "is_gloo_asked_for": false}}'
    )
    store.set("metrale_ray/place/1", said)
    with pytest.raises(LinkLost, match="nothing came from rank 1"):
        join(0, 2, store, Way("auto", "a"), timeout_s=0.3)
    assert not memory_left()


def test_a_peer_that_is_known_to_have_gone_ends_the_wait_for_it() -> None:
    def check_peers() -> None:
        raise LinkLost("rank 1 has gone", rank=1)

    store, _ = host_store(HOST, 20.0)
    with pytest.raises(LinkLost, match="rank 1 has gone"):
        join(0, 2, store, Way("auto", "a"), check_peers=check_peers)


def test_ranks_are_of_one_host_where_they_say_the_same_and_can_share_memory() -> None:
    elsewhere, unable = replace(PLACE, host="b"), replace(PLACE, why_not="there is no native core")
    assert _hosts([PLACE, elsewhere, PLACE, elsewhere]) == [[0, 2], [1, 3]]
    assert _hosts([PLACE, unable, PLACE]) == [[0, 2], [1]]
    assert _hosts([PLACE, replace(PLACE, is_gloo_asked_for=True), PLACE]) == [[0], [1], [2]]


def test_ranks_spin_only_where_each_of_their_threads_has_a_core() -> None:
    pinned = [replace(PLACE, cores=(0, 1), threads=2), replace(PLACE, cores=(2, 3), threads=2)]
    assert _spin_us(pinned) == SPIN_US
    assert _spin_us([PLACE, PLACE]) == SPIN_US
    assert _spin_us([PLACE, PLACE, PLACE]) == 0
    assert _spin_us([replace(PLACE, cores=(1,)), replace(PLACE, cores=(1,))]) == 0


def test_a_host_is_a_boot_with_its_processes_and_its_network(tmp_path: Path) -> None:
    assert this_host(tmp_path) is None
    spaces = tmp_path / "proc/self/ns"
    spaces.mkdir(parents=True)
    for kind in ("pid", "net"):
        (spaces / kind).symlink_to(f"{kind}:[7]")
    assert this_host(tmp_path) is None
    boot = tmp_path / "proc/sys/kernel/random"
    boot.mkdir(parents=True)
    (boot / "boot_id").write_text("abc\n")
    assert this_host(tmp_path) == "abc pid:[7] net:[7]"
    assert this_host() is not None


def test_the_way_is_auto_or_gloo() -> None:
    assert Way.here({}) == Way("auto", this_host())
    assert Way.here({"METRALE_COLLECTIVES": "gloo"}).way == "gloo"
    with pytest.raises(ConfigError, match="METRALE_COLLECTIVES is 'mpi'; allowed are auto and gloo"):
        Way.here({"METRALE_COLLECTIVES": "mpi"})
