# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which CPUs of this machine an engine's rank has taken for itself, and `pinned`, which keeps a thread on them.

A claim is a lock (flock(2)) on one file for each CPU, in a folder of this boot that every user of the machine shares.
The kernel drops it with the process, however that ends, so no claim outlives its owner; the empty files stay.

Rules. Claims are all or nothing, so a rank has its whole number of CPUs or floats over all of them. Claims only bind
who asks for them: other programs run where the kernel puts them. Where a control group allows less time than the mask
has CPUs, others are meant to run on those CPUs too, and nothing is claimed. What cannot be had is one line in the log,
never an error.

What it leaves out: processes that see another folder, as containers without a common /dev/shm do; such containers need
masks or quotas of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from metrale_ray.control_groups import ROOT, first_line
from metrale_ray.cores import Cpu, allowed_cpus, choose, cpus, quota, written_list

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
FOLDER = "metrale-ray-cores-"  # and the boot
CHOOSING = "choosing"  # the file whose lock is held while a rank chooses, so that two do not choose among each other's
# Choosing takes about a millisecond. Whoever is stopped in the middle of it holds the others up for this long.
CHOOSING_TIMEOUT_S = 2.0
RETRY_S = 0.002


class ClaimRefused(Exception):
    """No CPUs could be claimed, and why. `is_usual`: this is how the machine is set up, nothing went wrong."""

    def __init__(self, reason: str, *, is_usual: bool = False) -> None:
        super().__init__(reason)
        self.is_usual = is_usual


class Claim:
    """Locks on CPUs, held until `close` or the end of the process. Make one with `claim`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._locks: dict[int, int] = {}  # file descriptors by CPU

    @property
    def cpus(self) -> tuple[int, ...]:
        """The numbers of the CPUs, in their order."""
        return tuple(sorted(self._locks))

    def take(self, among: Iterable[Cpu]) -> None:
        """Add all of these that nobody has. Raises OSError where the folder cannot be used."""
        for cpu in among:
            lock = _locked(self._folder / f"cpu-{cpu.number}")
            if lock is not None:
                self._locks[cpu.number] = lock

    def keep(self, numbers: Collection[int]) -> None:
        """Let go of all but these."""
        for number in self._locks.keys() - set(numbers):
            os.close(self._locks.pop(number))

    def close(self) -> None:
        """Let go of all. May be called again."""
        self.keep(())


@contextlib.contextmanager
def pinned(num_threads: int, owner: str, *, root: Path = ROOT, folder: Path | None = None) -> Iterator[tuple[int, ...]]:
    """Keep this thread, and those that it makes meanwhile, on so many CPUs that no other claim has.

    Yields their numbers; none where they could not be had. Either is one line in the log, which begins with `owner`.
    After it, this thread may run where it could before.
    """
    allowed = allowed_cpus()
    try:
        held = _pin(num_threads, cpus(allowed, root), root, folder)
    except (ClaimRefused, OSError) as refused:
        level = logging.INFO if isinstance(refused, ClaimRefused) and refused.is_usual else logging.WARNING
        log.log(level, "%s: threads: %d, not pinned: %s", owner, num_threads, refused)
        held = None
    if held is None:
        yield ()
        return
    nodes = written_list({cpu.node for cpu in cpus(held.cpus, root)})
    log.info("%s: threads: %d, on CPUs %s of NUMA node %s", owner, num_threads, written_list(held.cpus), nodes)
    try:
        yield held.cpus
    finally:
        os.sched_setaffinity(0, allowed)
        held.close()


def _pin(num_cpus: int, among: Sequence[Cpu], root: Path, folder: Path | None) -> Claim:
    """Claim CPUs within this thread's mask, and keep the thread on them. Raises ClaimRefused and OSError."""
    if not hasattr(os, "sched_setaffinity"):
        raise ClaimRefused("this system does not let a thread choose its CPUs", is_usual=True)
    limit = quota(root)
    if limit is not None and limit < len(among):
        raise ClaimRefused(
            f"its control group may use {limit:g} CPUs' worth of time on {len(among)} CPUs, which others use too",
            is_usual=True,
        )
    held = claim(num_cpus, among, claims_folder(root) if folder is None else folder)
    try:
        os.sched_setaffinity(0, held.cpus)
    except OSError:
        held.close()
        raise
    return held


def claims_folder(root: Path = ROOT) -> Path:
    """Where the claims of this machine's present boot are: in shared memory where there is some."""
    boot = first_line(root / "proc/sys/kernel/random/boot_id").replace("-", "")[:12]
    above = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return above / f"{FOLDER}{boot}"


def claim(num_cpus: int, among: Sequence[Cpu], folder: Path, timeout_s: float = CHOOSING_TIMEOUT_S) -> Claim:
    """`num_cpus` CPUs of `among` that nobody has claimed, as `choose` chooses; `folder` is made where it is missing.

    Raises ClaimRefused where there are too few, or where someone else keeps choosing for `timeout_s`, and OSError where
    the folder cannot be used.
    """
    _make_shared(folder)
    held = Claim(folder)
    try:
        with _chosen_alone(folder / CHOOSING, timeout_s):
            held.take(among)
            free = held.cpus
            chosen = choose(among, {cpu.number for cpu in among} - set(free), num_cpus)
            if chosen is None:
                raise ClaimRefused(
                    f"it needs {num_cpus} CPUs, and {len(free)} of the {len(among)} that it may use are not claimed"
                )
            held.keep(chosen)
    except BaseException:
        held.close()
        raise
    return held


def _make_shared(folder: Path) -> None:
    """A folder that every user may put files into, and nobody may take another's out of."""
    try:
        folder.mkdir()
    except FileExistsError:
        return
    folder.chmod(0o777 | stat.S_ISVTX)  # whatever mask the process has


@contextlib.contextmanager
def _chosen_alone(file: Path, timeout_s: float) -> Iterator[None]:
    deadline = time.monotonic() + timeout_s
    while (lock := _locked(file)) is None:
        if time.monotonic() >= deadline:
            raise ClaimRefused(f"another process has held {file} for {timeout_s:g} s")
        time.sleep(RETRY_S)
    try:
        yield
    finally:
        os.close(lock)


def _locked(file: Path) -> int | None:
    """The descriptor of `file`, made where it is missing and locked; None where another has it."""
    descriptor = _opened(file)
    if descriptor is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


def _opened(file: Path) -> int | None:
    """To be locked, for which reading is enough: others cannot be written. None where it cannot be read."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(file, flags | os.O_CREAT | os.O_EXCL, 0o444)
    except FileExistsError:
        with contextlib.suppress(PermissionError):
            return os.open(file, flags)
        return None
    os.fchmod(descriptor, 0o444)  # whatever mask the process has
    return descriptor
