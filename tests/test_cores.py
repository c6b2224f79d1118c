# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which CPUs a process may use, and which are taken of them, on made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.cores import Cpu, Usable, choose, cpus, parse_list, quota, usable, written_list
from tests.machines import Machine

LAPTOP = Machine(num_nodes=1, cores_per_node=4, threads_per_core=2)  # CPUs 0-3, and their second threads 4-7
SERVER = Machine(num_nodes=2, cores_per_node=4, threads_per_core=2)  # node 0: 0-3 and 8-11; node 1: 4-7 and 12-15


def test_cores_and_nodes_are_what_the_system_says(tmp_path: Path) -> None:
    found = cpus(range(16), SERVER.write(tmp_path))
    assert [cpu.core for cpu in found] == [*range(8), *range(8)]
    assert [cpu.node for cpu in found] == [0, 0, 0, 0, 1, 1, 1, 1] * 2


def test_an_older_kernels_name_of_the_siblings_is_read_too(tmp_path: Path) -> None:
    folder = tmp_path / "sys/devices/system/cpu/cpu5/topology"
    folder.mkdir(parents=True)
    (folder / "thread_siblings_list").write_text("1,5\n")
    assert cpus([5], tmp_path) == [Cpu(5, core=1, node=0)]


@pytest.mark.parametrize("text", ["", "x", "3-", "7-9", "0;5"])
def test_where_the_system_does_not_tell_each_cpu_is_a_core_of_one_node(tmp_path: Path, text: str) -> None:
    assert cpus([5, 2], tmp_path) == [Cpu(2, 2, 0), Cpu(5, 5, 0)]
    folder = tmp_path / "sys/devices/system/cpu/cpu5/topology"
    folder.mkdir(parents=True)
    (folder / "core_cpus_list").write_text(text)
    assert cpus([5], tmp_path) == [Cpu(5, 5, 0)]


@given(st.sets(st.integers(0, 300)))
def test_a_list_is_read_as_it_was_written(numbers: set[int]) -> None:
    assert parse_list(written_list(numbers)) == numbers


def test_lists_are_written_as_the_kernel_does() -> None:
    assert written_list([8, 0, 1, 2, 10, 11]) == "0-2,8,10-11"


@pytest.mark.parametrize(
    ("allowed", "group", "expected"),
    [
        (range(8), None, Usable(8, 4)),
        (range(4), None, Usable(4, 4)),
        ((0, 4), None, Usable(2, 1)),
        (range(8), "300000 100000", Usable(3, 3)),
        (range(8), "250000 100000", Usable(2.5, 2)),
        (range(8), "50000 100000", Usable(0.5, 1)),
        (range(8), "max 100000", Usable(8, 4)),
        ((0, 1), "800000 100000", Usable(2, 2)),
    ],
)
def test_mask_hyperthreads_and_quota_say_what_can_be_used(
    tmp_path: Path, allowed: range, group: str | None, expected: Usable
) -> None:
    assert usable(LAPTOP.write(tmp_path, cpu_max=group), allowed) == expected


def test_the_least_quota_of_all_groups_counts(tmp_path: Path) -> None:
    root = LAPTOP.write(tmp_path, cpu_max="300000 100000")
    assert quota(root) == 3
    (root / "sys/fs/cgroup/cpu.max").write_text("200000 100000\n")
    assert quota(root) == 2


def test_this_machine_has_a_core() -> None:
    here = usable()
    assert here.num_cpus > 0
    assert here.num_cores >= 1


# The choice


@pytest.mark.parametrize(
    ("taken", "num_cpus", "expected"),
    [
        ([], 2, [0, 1]),
        ([], 4, [0, 1, 2, 3]),
        ([0, 1], 2, [2, 3]),  # the node that has the least left over
        ([0, 1, 2], 2, [4, 5]),  # not one of each node
        ([8], 4, [4, 5, 6, 7]),  # a core is taken by whichever of its threads
        ([], 6, [0, 1, 2, 3, 4, 5]),  # whole cores of two nodes before second threads of one
        ([4, 5, 6, 7], 4, [0, 1, 2, 3]),
        ([0, 1, 2, 4], 4, [3, 5, 6, 7]),  # as few nodes as can be
        ([4, 5, 6, 7], 6, [0, 1, 2, 3, 8, 9]),  # its own second threads before those beside another's
        ([4, 5, 6, 7], 9, [0, 1, 2, 3, 8, 9, 10, 11, 12]),
        ([], 16, list(range(16))),
        ([3], 16, None),
        (list(range(16)), 1, None),
    ],
)
def test_whole_cores_of_one_node_are_taken_as_long_as_there_are_some(
    tmp_path: Path, taken: list[int], num_cpus: int, expected: list[int] | None
) -> None:
    assert choose(cpus(range(16), SERVER.write(tmp_path)), taken, num_cpus) == expected


@st.composite
def machines(draw: st.DrawFn) -> list[Cpu]:
    """CPUs of any shape: cores with one to three threads, on up to three nodes, in any numbering."""
    threads = draw(st.lists(st.integers(1, 3), min_size=1, max_size=8))
    nodes = [draw(st.integers(0, 2)) for _ in threads]
    numbers = draw(st.permutations(range(sum(threads))))
    rest = iter(numbers)
    made: list[Cpu] = []
    for node, num_threads in zip(nodes, threads, strict=True):
        own = [next(rest) for _ in range(num_threads)]
        made += [Cpu(number, min(own), node) for number in own]
    return sorted(made, key=lambda cpu: cpu.number)


@given(machines(), st.data())
def test_a_choice_is_of_free_cpus_as_many_as_asked_and_as_whole_and_near_as_can_be(
    among: list[Cpu], data: st.DataObject
) -> None:
    taken = set(data.draw(st.lists(st.sampled_from([cpu.number for cpu in among]))))
    num_cpus = data.draw(st.integers(1, len(among)))
    chosen = choose(among, taken, num_cpus)
    free = {cpu.number for cpu in among} - taken
    if chosen is None:
        assert len(free) < num_cpus
        return
    assert len(set(chosen)) == len(chosen) == num_cpus
    assert set(chosen) <= free
    broken = {cpu.core for cpu in among if cpu.number in taken}
    whole = {cpu.core: cpu.node for cpu in among if cpu.core not in broken}
    used = [next(cpu for cpu in among if cpu.number == number) for number in chosen]
    if num_cpus <= len(whole):
        assert len({cpu.core for cpu in used} & whole.keys()) == num_cpus
        fits_one = any(list(whole.values()).count(node) >= num_cpus for node in whole.values())
        assert not fits_one or len({cpu.node for cpu in used}) == 1
    else:
        assert whole.keys() <= {cpu.core for cpu in used}
