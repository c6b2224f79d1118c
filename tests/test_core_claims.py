# SPDX-License-Identifier: MIT OR Apache-2.0
"""Claims of CPUs between real processes, and the threads that are kept on them."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from metrale_ray.core_claims import CHOOSING, Claim, ClaimRefused, claim, claims_folder, pinned
from metrale_ray.cores import Cpu, allowed_cpus
from tests.machines import Machine

FOUR = [Cpu(number, number, 0) for number in range(4)]
# Claims what it is told in each line, says what it got, and holds it.
OTHER = """
import json, sys
from pathlib import Path
from metrale_ray.core_claims import ClaimRefused, claim
from metrale_ray.cores import Cpu
held = []
for line in sys.stdin:
    num_cpus, total = json.loads(line)
    try:
        held.append(claim(num_cpus, [Cpu(n, n, 0) for n in range(total)], Path(sys.argv[1])))
        print(json.dumps(held[-1].cpus), flush=True)
    except ClaimRefused as refused:
        print(json.dumps(str(refused)), flush=True)
"""


class Other:
    """Another process that claims CPUs."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", OTHER, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def claims(self, num_cpus: int, total: int = 4) -> object:
        """The numbers that it got of so many, or why it got none."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([num_cpus, total]), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


@contextmanager
def other(folder: Path) -> Iterator[Other]:
    made = Other(folder)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "claims"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with this one's CPUs, all in one node, and without a quota."""
    return Machine(1, max(allowed_cpus()) + 1, 1).write(tmp_path / "root")


@pytest.mark.processes
def test_two_processes_never_have_the_same_cpus_and_a_killed_one_has_none(folder: Path) -> None:
    with other(folder) as first, other(folder) as second:
        assert first.claims(2) == [0, 1]
        assert second.claims(2) == [2, 3]
        with pytest.raises(ClaimRefused, match="it needs 1 CPUs, and 0 of the 4 that it may use are not claimed"):
            claim(1, FOUR, folder)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        assert claim(2, FOUR, folder).cpus == (0, 1)


@pytest.mark.processes
def test_processes_that_claim_at_once_all_get_their_whole_number(folder: Path, scale: int) -> None:
    with other(folder) as first, other(folder) as second, other(folder) as third, ThreadPoolExecutor(3) as at_once:
        processes = (first, second, third)
        total = 9 * scale
        for begin in range(0, total, 9):  # each round takes 9 more of those that are there
            got = list(at_once.map(lambda each, upto=begin + 9: each.claims(3, upto), processes))
            numbers = sorted(number for each in got for number in each)  # type: ignore[attr-defined]
            assert numbers == list(range(begin, begin + 9))


def test_what_was_not_had_whole_is_left_to_others(folder: Path) -> None:
    held = claim(3, FOUR, folder)
    with pytest.raises(ClaimRefused, match="it needs 2 CPUs, and 1 of the 4"):
        claim(2, FOUR, folder)
    last = claim(1, FOUR, folder)
    assert (held.cpus, last.cpus) == ((0, 1, 2), (3,))
    held.close()
    held.close()
    assert held.cpus == ()
    assert claim(3, FOUR, folder).cpus == (0, 1, 2)


def test_whoever_never_stops_choosing_is_not_waited_for(folder: Path) -> None:
    claim(1, FOUR, folder).close()
    with (folder / CHOOSING).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ClaimRefused, match=r"another process has held .*choosing for 0\.01 s"):
            claim(1, FOUR, folder, timeout_s=0.01)
    assert claim(1, FOUR, folder).cpus == (0,)


def test_the_files_are_open_to_every_user_whatever_mask_the_process_has(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        held = claim(1, FOUR, folder)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o7777 == 0o1777
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o444}
    held.close()


def test_a_link_or_a_pipe_that_somebody_put_there_is_neither_followed_nor_waited_for(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "cpu-0")
    assert claim(1, FOUR, folder).cpus == (0,)  # a lock is a lock
    (folder / "cpu-1").unlink()
    (folder / "cpu-1").symlink_to(folder / "elsewhere")
    with pytest.raises(OSError, match="cpu-1"):
        claim(1, FOUR[1:], folder)
    assert not (folder / "elsewhere").exists()


def test_a_boot_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = claims_folder(Machine(1, 1, 1).write(tmp_path))
    assert folder.name == "metrale-ray-cores-0123abcd4567"
    assert claims_folder().name != folder.name


# Threads


def test_a_pinned_thread_and_those_it_makes_have_only_the_claimed_cpus(
    folder: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, seen = allowed_cpus(), []
    caplog.set_level("INFO", logger="metrale_ray.core_claims")
    with pinned(1, "rank 3", root=root, folder=folder) as mine:
        thread = threading.Thread(target=lambda: seen.append(allowed_cpus()))
        thread.start()
        thread.join()
        assert allowed_cpus() == seen[0] == set(mine)
        assert mine == (min(before),)
        with pytest.raises(ClaimRefused):
            claim(1, [Cpu(mine[0], 0, 0)], folder)
    assert allowed_cpus() == before
    assert [record.message for record in caplog.records] == [f"rank 3: threads: 1, on CPUs {mine[0]} of NUMA node 0"]
    claim(len(before), [Cpu(number, number, 0) for number in before], folder).close()


def test_the_other_threads_of_the_process_keep_their_mask(folder: Path, root: Path) -> None:
    before, entered, leave = allowed_cpus(), threading.Event(), threading.Event()

    def compute() -> None:
        with pinned(1, "rank 0", root=root, folder=folder):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=compute)
    thread.start()
    assert entered.wait(10)
    assert allowed_cpus() == before
    leave.set()
    thread.join()


def test_a_rank_that_does_not_get_its_cpus_floats_and_says_so_once(
    folder: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = allowed_cpus()
    wanted = len(before) + 1
    with pinned(wanted, "rank 1", root=root, folder=folder) as mine:
        assert mine == ()
        assert allowed_cpus() == before
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (
            logging.WARNING,
            f"rank 1: threads: {wanted}, not pinned: it needs {wanted} CPUs, and {len(before)} of the {len(before)} "
            "that it may use are not claimed",
        )
    ]


def test_nothing_is_claimed_where_a_quota_shares_the_cpus_with_others(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="metrale_ray.core_claims")
    root = Machine(1, 4, 1).write(tmp_path / "root", cpu_max="50000 100000")
    with pinned(1, "rank 0", root=root, folder=folder) as mine:
        assert mine == ()
    assert caplog.records[0].levelno == logging.INFO
    assert "its control group may use 0.5 CPUs' worth of time on" in caplog.text
    assert not folder.exists()


def test_a_folder_that_cannot_be_used_is_a_line_in_the_log(
    tmp_path: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with pinned(1, "rank 0", root=root, folder=tmp_path / "file" / "claims") as mine:
        assert mine == ()
    assert "rank 0: threads: 1, not pinned: [Errno 20] Not a directory" in caplog.text


def test_cpus_that_the_system_does_not_give_are_not_kept(
    folder: Path, root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with pinned(1, "rank 0", root=root, folder=folder) as mine:
        assert mine == ()
        claim(1, [Cpu(min(allowed_cpus()), 0, 0)], folder).close()
    assert "not pinned: [Errno 1] Operation not permitted" in caplog.text


def test_an_error_of_what_runs_pinned_is_its_own(folder: Path, root: Path) -> None:
    before = allowed_cpus()
    with pytest.raises(OSError, match="mine"), pinned(1, "rank 0", root=root, folder=folder):
        raise OSError("mine")
    assert allowed_cpus() == before


def test_a_claim_is_all_or_nothing_when_its_folder_breaks_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Claim] = []
    init = Claim.__init__

    def noted(self: Claim, folder: Path) -> None:
        init(self, folder)
        made.append(self)

    monkeypatch.setattr(Claim, "__init__", noted)
    folder.mkdir()
    (folder / "cpu-2").symlink_to(folder / "cpu-2")
    with pytest.raises(OSError, match="cpu-2"):
        claim(1, FOUR, folder)
    assert [each.cpus for each in made] == [()]
