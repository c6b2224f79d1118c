# SPDX-License-Identifier: MIT OR Apache-2.0
"""Several hosts on one machine that are reached by ssh, and one from which they are: for `ray up` as a person runs it.

    with SshHosts(folder, count=3) as site:
        site.run("ssh", site.hosts[0].address, "hostname")

Rules. A host has a network namespace with one address, a PID namespace, so that what stops Ray there stops nobody else,
a hostname, a home folder, a /tmp/ray and a /dev/shm of its own, and sshd. The launching host has all of these but sshd
and the PID namespace. All other files are common: the environment, and this project. Everything ends with the `with`.
Names hold the maker's process id, and what a killed run left the next one removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.namespaces import NoNamespaces, ip, listeners, remove, remove_left_overs

PREFIX = "10.77.6"
LAUNCHER = f"{PREFIX}.100"
TIMEOUT_S = 20.0
NAME = re.compile(r"sites-(\d+)-\w+")
SSH_PORT = 22
SSH_SOCKETS = f"/tmp/ray_ssh_{hashlib.sha256(b'root').hexdigest()[:10]}"  # `ray up`'s, for connections that it shares
INIT = """
import os, subprocess, sys
daemon = subprocess.Popen(sys.argv[1:])
while os.wait()[0] != daemon.pid:
    pass
"""
"""The first process of a PID namespace is the parent of every orphan, and has to notice their end."""


@dataclass(frozen=True, slots=True)
class SshHost:
    """One host. `home` is its home folder, seen from outside; `link` its end of the network, in `net`."""

    name: str
    namespace: str
    address: str
    home: Path
    ray: Path
    link: str
    net: str

    def processes(self) -> dict[int, str]:
        """What runs here, beside the first process and sshd: command lines by process id as seen from outside."""
        found = {}
        for pid in ip("netns", "pids", self.namespace).split():
            with contextlib.suppress(OSError):  # it has just ended
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
                if command and not re.match(r"unshare |\S+ -c \nimport os, subprocess|sshd|/usr/sbin/sshd", command):
                    found[int(pid)] = command[:160]
        return found

    def ports(self) -> set[int]:
        """The TCP ports that something listens on here, but sshd's."""
        return {listener.port for listener in listeners(self.namespace)} - {SSH_PORT}

    def cut(self) -> None:
        """Take it off the network."""
        ip("-n", self.net, "link", "set", self.link, "down")

    def mend(self) -> None:
        """Put it back."""
        ip("-n", self.net, "link", "set", self.link, "up")


class SshHosts:
    """Makes the hosts and ends them. Raises NoNamespaces where that is not possible.

    `home` is every host's home folder as it sees it, `key` the private key that opens all of them.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._count = count
        self._names: list[str] = []
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.home = folder / "home"
        self.key = folder / "key"
        self.hosts: tuple[SshHost, ...] = ()
        self.launcher: SshHost

    def __enter__(self) -> SshHosts:
        for tool, package in (("ip", "iproute2"), ("sshd", "openssh-server"), ("rsync", "rsync"), ("ssh", "ssh")):
            if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None:
                raise NoNamespaces(f"there is no `{tool}` (Debian and Ubuntu: the package {package})")
        try:
            remove_left_overs(NAME)
            self._make()
        except subprocess.CalledProcessError as error:
            self.__exit__(None, None, None)
            raise NoNamespaces(f"`{' '.join(error.cmd)}` failed, which needs root: {error.stderr.strip()}") from error
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for daemon in self._daemons:
            daemon.kill()  # with it goes the PID namespace
            daemon.wait()
        for name in self._names:
            remove(name)

    def start(self, *argv: str, log: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a command on the launching host, in a session of its own; what it writes goes to `log`."""
        with log.open("wb") as out:
            return subprocess.Popen(
                self._on_launcher(argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment(environment),
                cwd=self._folder,
                start_new_session=True,
            )

    def run(
        self,
        *argv: str,
        timeout_s: float = 120.0,
        environment: Mapping[str, str] | None = None,
        log: str = "command.log",
    ) -> tuple[int, str]:
        """Run a command on the launching host: its exit code, and what it wrote to both outputs.

        `log` is the name of the file that it goes through; commands beside each other need different ones.
        """
        file = self._folder / log
        process = self.start(*argv, log=file, environment=environment)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            end(process)
            raise AssertionError(f"{shlex.join(argv)} took over {timeout_s:g} s: {file.read_text()[-4000:]}") from None
        return code, file.read_text(errors="replace")

    def _make(self) -> None:
        owner = os.getpid()
        net = f"sites-{owner}-net"
        self.home.mkdir(parents=True)
        self._write_files()
        self._add(net)
        ip("-n", net, "link", "add", "bridge", "type", "bridge")
        ip("-n", net, "address", "add", f"{LAUNCHER}/24", "dev", "bridge")
        for link in ("lo", "bridge"):
            ip("-n", net, "link", "set", link, "up")
        self.launcher = self._host("launcher", net, LAUNCHER, "bridge", net)
        made = []
        for number in range(1, self._count + 1):
            host = self._host(f"node-{number}", f"sites-{owner}-{number}", f"{PREFIX}.{number}", f"to-{number}", net)
            self._add(host.namespace)
            ip("-n", net, "link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            ip("-n", net, "link", "set", host.link, "master", "bridge", "up")
            ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", host.namespace, "link", "set", link, "up")
            self._serve_ssh(host)
            made.append(host)
        self.hosts = tuple(made)

    def _add(self, name: str) -> None:
        ip("netns", "add", name)
        self._names.append(name)

    def _host(self, name: str, namespace: str, address: str, link: str, net: str) -> SshHost:
        folder = self._folder / name
        for part in ("home", "ray", "ssh"):
            (folder / part).mkdir(parents=True, mode=0o700)
        return SshHost(name, namespace, address, folder / "home", folder / "ray", link, net)

    def _write_files(self) -> None:
        """The key, and a list of users in which this one has the common path as its home."""
        for key in (self.key, self._folder / "host-key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        users = Path("/etc/passwd").read_text()
        own = re.sub(r"(?m)^(root:.*):[^:]*:[^:]*$", rf"\1:{self.home}:/bin/bash", users)
        (self._folder / "passwd").write_text(own)
        for common in ("/tmp/ray", SSH_SOCKETS):  # where each host's own is mounted
            Path(common).mkdir(exist_ok=True)

    def _serve_ssh(self, host: SshHost) -> None:
        log = self._folder / host.name / "sshd.log"
        options = {
            "ListenAddress": host.address,
            "AuthorizedKeysFile": f"{self.key}.pub",
            "PermitRootLogin": "prohibit-password",
            "StrictModes": "no",  # the key is in a test's folder
            "UsePAM": "no",
            "PidFile": "none",
        }
        sshd = ["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", "-h", str(self._folder / "host-key")]
        sshd += [f"-o{name}={value}" for name, value in options.items()]
        own_pids = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        argv = self._on(host, [sys.executable, "-c", INIT, *sshd], [*own_pids])
        with log.open("wb") as out:
            self._daemons.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out))
        deadline = time.monotonic() + TIMEOUT_S
        while b"listening" not in log.read_bytes():
            if self._daemons[-1].poll() is not None or time.monotonic() > deadline:
                raise NoNamespaces(f"sshd does not run: {log.read_text()}")
            time.sleep(0.05)

    def _on_launcher(self, argv: tuple[str, ...]) -> list[str]:
        return self._on(self.launcher, list(argv), ["unshare"])

    def _on(self, host: SshHost, argv: list[str], unshare: list[str]) -> list[str]:
        """A command line that runs `argv` on a host, with its own folders where the common paths are."""
        script = f"""
            set -e
            hostname {host.name}
            mount --bind {shlex.quote(str(host.home))} {shlex.quote(str(self.home))}
            mount --bind {shlex.quote(str(host.ray))} /tmp/ray
            mount --bind {shlex.quote(str(host.ray.with_name("ssh")))} {SSH_SOCKETS}
            mount --bind {shlex.quote(str(self._folder / "passwd"))} /etc/passwd
            mount -t tmpfs -o size=4g tmpfs /dev/shm
            mount -t tmpfs tmpfs /run
            mkdir /run/sshd
            exec "$@"
        """
        enter = ["ip", "netns", "exec", host.namespace, *unshare, "--mount", "--uts"]
        return [*enter, "sh", "-c", script, "sh", *argv]

    def _environment(self, more: Mapping[str, str] | None) -> dict[str, str]:
        """What a person's shell on the launching host has."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST_"))}
        temporary = self._folder / "tmp"
        temporary.mkdir(exist_ok=True)
        own = {"HOME": str(self.home), "TMPDIR": str(temporary), "TERM": "dumb", "RAY_AUTH_MODE": "token"}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**inherited, **own, "PATH": path, **(more or {})}


def end(process: subprocess.Popen[bytes]) -> None:
    """End a started command with all of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
