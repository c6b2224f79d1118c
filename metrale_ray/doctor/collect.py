# SPDX-License-Identifier: MIT OR Apache-2.0
"""Looking at this machine: `collect` gives the facts of one process's surroundings as a plain mapping.

Rules. Each fact is looked for on its own, and one that cannot be seen is left out. Nothing is changed, fetched or kept.
What reads files takes their folder, so that tests can bring another machine.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

import metrale_ray
from metrale_ray.control_groups import ROOT, first_line, lines
from metrale_ray.cores import usable
from metrale_ray.errors import MetraleError
from metrale_ray.model import memory as of_process

PACKAGES = ("ray", "torch", "pyzmq", "msgpack", "safetensors", "transformers", "numpy")
SIOCGIFADDR = 0x8915  # asks for an interface's IPv4 address, see netdevice(7)
GPU_TIMEOUT_S = 10.0


def collect(model: str | None = None, revision: str | None = None, root: Path = ROOT) -> dict[str, Any]:
    """All facts but those that only Ray knows. Imports torch, and opens the checkpoint where one is named."""
    facts: dict[str, Any] = {"host": socket.gethostname(), "versions": versions(), "addresses": addresses(root)}
    facts |= {**shared_memory(root), **cores(root), **memory(root), **open_files(), **gpus()}
    facts["port_range"] = port_range(root)
    facts |= _libraries(root)
    if model is not None:
        facts |= checkpoint(model, revision)
    return facts


def versions() -> dict[str, str | None]:
    """Versions of Python, of this package and of those that it stands on; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "metrale_ray": metrale_ray.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _libraries(root: Path) -> dict[str, Any]:
    """What only importing tells, and the reason where an import fails."""
    facts: dict[str, Any] = {"import_errors": {}}
    try:
        import zmq

        facts["has_curve"] = bool(zmq.has("curve"))
    except (ImportError, OSError) as error:
        facts["import_errors"]["pyzmq"] = _text(error)
    try:
        from metrale_ray.model import identity
        from metrale_ray.model.device import cuda_version, resolve_device

        facts |= {"build": identity.build(), "torch_cuda": cuda_version()}
        facts["instructions"] = identity.instructions(resolve_device("cpu"), root)
    except (ImportError, OSError) as error:  # a shared library that is missing is an OSError
        facts["import_errors"]["torch"] = _text(error)
    return facts | native_core()


def native_core() -> dict[str, str]:
    """The native core that this process loads, or why there is none."""
    from metrale_ray.native import library

    core = library.library()
    if core is None:
        return {"native_core_missing": library.why_not()}
    _, compiler = library.build().split(" ", 1)
    running = library.instructions()
    return {"native_core": f"{running} kernels run; built for {', '.join(library.sets())} by {compiler}"}


def addresses(root: Path = ROOT) -> dict[str, list[str]]:
    """Interfaces with their addresses. Of IPv4 each interface's first one, as the system's call gives no more."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue  # it has none
            found.setdefault(name, []).append(socket.inet_ntoa(answer[20:24]))
    for line in lines(root / "proc/net/if_inet6"):
        number, *_, name = line.split()
        found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number)))
    return found


def shared_memory(root: Path = ROOT) -> dict[str, int]:
    """Size of /dev/shm, and how much of it is free."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return {}
    return {"shared_memory": found.f_blocks * found.f_frsize, "shared_memory_free": found.f_bavail * found.f_frsize}


def cores(root: Path = ROOT) -> dict[str, Any]:
    """Cores that this process may use: its affinity, and its control group's quota if that is less."""
    return {"cores": usable(root).num_cpus, "machine_cores": os.cpu_count()}


def memory(root: Path = ROOT) -> dict[str, Any]:
    """Memory that this process can still get, and its control group's limit where there is one."""
    found = of_process.memory(root)
    return {"memory": found.available_bytes, "memory_limit": found.limit_bytes}


def open_files() -> dict[str, int]:
    """The limits on open files of a process: what holds, and how far it may be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"open_files": soft, "open_files_hard": hard}


def gpus() -> dict[str, list[str]]:
    """The GPUs that the driver knows, whatever this process may see of them. Ray hides them from tasks without one."""
    if shutil.which("nvidia-smi") is None:
        return {"gpus": []}
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {"gpus": []}
    return {"gpus": [line.strip() for line in done.stdout.splitlines() if line.strip()] if not done.returncode else []}


def port_range(root: Path = ROOT) -> list[int] | None:
    """The ports that the system chooses from for a socket that names none."""
    parts = first_line(root / "proc/sys/net/ipv4/ip_local_port_range").split()
    return [int(part) for part in parts] if len(parts) == 2 else None


def checkpoint(model: str, revision: str | None) -> dict[str, Any]:
    """The digests of the checkpoint's files as this machine has them, or why it cannot be served from here.

    Nothing is fetched: a hub id that is not in the cache is told with what a start would fetch.
    """
    try:
        from metrale_ray.model import hub

        folder = hub.find(model, revision)
        if folder is None:
            return {"checkpoint_absent" if hub.can_fetch() else "checkpoint_error": hub.absence(model, revision)}
        return {"checkpoint_digests": _digests(folder)}
    except MetraleError as error:
        return {"checkpoint_error": error.message}
    except Exception as error:  # noqa: BLE001  whatever is wrong with the files, the rest of the machine is told
        return {"checkpoint_error": _text(error)}


def _digests(folder: Path) -> dict[str, str]:
    """Of all files, after checking that they hold what a rank needs."""
    from metrale_ray.model.checkpoint import open_checkpoint
    from metrale_ray.model.weights import plan_weights, read_decoder_config

    found = open_checkpoint(str(folder))
    plan_weights(found, read_decoder_config(found), 0, 1)
    return dict(found.digests)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'}"
