# SPDX-License-Identifier: MIT OR Apache-2.0
"""Two hosts on one machine: network namespaces joined by a link that can be cut, each with an interface more.

    with TwoHosts(folder) as (here, there):
        subprocess.run(here.command("ip", "address"))

Rules. Each host has 127.0.0.1, its `address` on the link `main`, and another one on the link `other`, which leads
nowhere and has the default route: whoever guesses an address from the routes gets that one. The path `host.same` leads
to a folder of its own on each host. Everything ends with the `with`: every process in the namespaces, and they with
their links. Names hold the maker's process id, so runs do not collide, and what a killed run left the next one removes.

What it leaves out: processes, files and shared memory are common to both hosts, but for that one folder.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import pytest

Made = TypeVar("Made")

MAIN, OTHER = "main", "other"
TIMEOUT_S = 20.0
LISTENING = "0A"  # of /proc/net/tcp
NAME = re.compile(r"hosts-(\d+)-[ab]")
DEAF_TABLE = "100"
NOBODY = "02:00:00:00:00:01"  # a hardware address that no interface has


class NoNamespaces(Exception):
    """Namespaces cannot be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that listens: on one address, or on every one."""

    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace. `folder` is what `same`, a path that both hosts know, leads to on this one."""

    namespace: str
    address: str
    other_address: str
    folder: Path
    same: Path

    def command(self, *argv: str) -> list[str]:
        """A command line that runs `argv` on this host."""
        mount = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "sh", "-c", mount, "sh", str(self.folder), str(self.same), *argv]

    def pids(self) -> list[int]:
        """The processes that run on this host."""
        return [int(pid) for pid in ip("netns", "pids", self.namespace).split()]

    def named(self, *prefixes: str) -> dict[int, str]:
        """Those whose command begins with one of `prefixes`."""
        found = {}
        for pid in self.pids():
            with contextlib.suppress(OSError):  # it has just ended
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                if command.startswith(prefixes):
                    found[pid] = command[:80]
        return found

    def listeners(self) -> set[Listener]:
        """Every TCP socket that listens on this host."""
        return listeners(self.namespace)


class TwoHosts:
    """Makes both hosts and ends them. Raises NoNamespaces where that is not possible."""

    def __init__(self, folder: Path) -> None:
        self._names = [f"hosts-{os.getpid()}-{letter}" for letter in "ab"]
        self._folder = folder
        self.hosts: tuple[Host, Host]

    def __enter__(self) -> tuple[Host, Host]:
        if shutil.which("ip") is None:
            raise NoNamespaces("there is no `ip` command (Debian and Ubuntu: the package iproute2)")
        try:
            remove_left_overs(NAME)
            self._make()
        except subprocess.CalledProcessError as error:
            self.__exit__(None, None, None)
            raise NoNamespaces(f"`{' '.join(error.cmd)}` failed, which needs root: {error.stderr.strip()}") from error
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self.hosts

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self._names:
            remove(name)

    def _make(self) -> None:
        for name in self._names:
            ip("netns", "add", name)
        first, second = self._names
        ip("link", "add", MAIN, "netns", first, "type", "veth", "peer", "name", MAIN, "netns", second)
        same = self._folder / "same"
        same.mkdir(parents=True)
        made = []
        for number, name in enumerate(self._names, start=1):
            folder = self._folder / f"host-{number}"
            folder.mkdir()
            made.append(Host(name, f"10.77.5.{number}", f"172.20.9.{number}", folder, same))
            ip("-n", name, "link", "add", OTHER, "type", "veth", "peer", "name", f"{OTHER}-end")
            ip("-n", name, "address", "add", f"{made[-1].address}/24", "dev", MAIN)
            ip("-n", name, "address", "add", f"{made[-1].other_address}/24", "dev", OTHER)
            for link in ("lo", MAIN, OTHER, f"{OTHER}-end"):
                ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "route", "add", "default", "dev", OTHER)
        self.hosts = (made[0], made[1])


@contextlib.contextmanager
def made(rig: contextlib.AbstractContextManager[Made]) -> Iterator[Made]:
    """What `rig` makes. Where that is not possible the test is skipped, but not with HOSTS_TESTS=required."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(rig)
        except NoNamespaces as error:
            if os.environ.get("HOSTS_TESTS") == "required":
                raise
            pytest.skip(f"several hosts cannot be made here: {error}")
        yield hosts


def cut(host: Host) -> None:
    """Take the link `main` down at this host: what is on its way is lost, and nobody is told."""
    ip("-n", host.namespace, "link", "set", MAIN, "down")


def mend(host: Host) -> None:
    """Bring the link back. Does nothing where it is up."""
    ip("-n", host.namespace, "link", "set", MAIN, "up")


def deafen(host: Host, peer: Host, ports: tuple[int, int]) -> None:
    """Lose what `host` sends to `peer` from and to a port of this range, both ends included, as a firewall would."""
    first, last = ports
    name, link = host.namespace, ("dev", OTHER)
    ip("-n", name, "neigh", "replace", peer.address, "lladdr", NOBODY, *link)
    ip("-n", name, "route", "replace", f"{peer.address}/32", *link, "table", DEAF_TABLE)
    ip("-n", name, "rule", "add", *_deaf_rule(first, last))


def hear(host: Host, ports: tuple[int, int]) -> None:
    """End what `deafen` began."""
    ip("-n", host.namespace, "rule", "del", *_deaf_rule(*ports))


def _deaf_rule(first: int, last: int) -> list[str]:
    span = f"{first}-{last}"
    return ["ipproto", "tcp", "sport", span, "dport", span, "table", DEAF_TABLE]


def ip(*argv: str) -> str:
    """What `ip` says."""
    done = subprocess.run(["ip", *argv], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return done.stdout


def listeners(namespace: str) -> set[Listener]:
    """Every TCP socket that listens in a namespace."""
    found: set[Listener] = set()
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in ip("netns", "exec", namespace, "cat", f"/proc/net/{table}").splitlines()[1:]]
        found |= {_listener(row[1]) for row in rows if row[3] == LISTENING}
    return found


def _listener(local: str) -> Listener:
    """A socket's own end as /proc/net/tcp has it: words of 4 bytes, each in this machine's byte order."""
    digits, port = local.split(":")
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    return Listener(str(ipaddress.ip_address(b"".join(words))), int(port, 16))


def remove_left_overs(name: re.Pattern[str]) -> None:
    """Remove the namespaces of this name whose maker is gone; the first group is the maker's process id."""
    for line in ip("netns", "list").splitlines():
        match = name.fullmatch(line.split()[0])
        if match and not Path(f"/proc/{match[1]}").exists():
            remove(match[0])


def remove(name: str) -> None:
    """End every process in a namespace, and the namespace with its links. Nothing to do where there is none."""
    with contextlib.suppress(subprocess.CalledProcessError):  # it was never made
        deadline = time.monotonic() + TIMEOUT_S
        while (pids := ip("netns", "pids", name).split()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        ip("netns", "del", name)
