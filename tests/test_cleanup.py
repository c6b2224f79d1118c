# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whatever ends an engine, 15 seconds later nothing of it is left, and the next one of the same name starts at once.

One Ray serves all cases; each runs a script (`cleanup_driver`) with an engine of two ranks and ends the script, the
head or the worker: by a signal or an exception, while it loads, idles, or is in the middle of a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.core_claims import claims_folder
from tests.fixtures.tiny import write_tiny
from tests.processes import LEFT_S, OwnRay, Run, is_running, until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(200)]

NAME = "cleanup"
START_S = 90.0
ENDS_S = 15.0  # an engine that lost a rank is noticed by its script within this; a script that noticed nothing is ended
STUCK_S = 120  # far longer than a test
NUM_STARTS = 3
PHASES = ("load", "idle", "step")
VICTIMS = ("driver", "head", "worker")
MEANS = ("kill", "term", "int", "exception")
BY_DEFAULT = (
    ("driver", "int", "load"),
    ("driver", "exception", "idle"),
    ("head", "kill", "step"),
    ("worker", "term", "step"),
)
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}
STUCK = {"load": {"cmd": "load", "phase": "validation"}, "step": {"cmd": "decode", "phase": "inside"}}
EXCEPTION = {"load": {"cmd": "load"}, "idle": {"cmd": "ping"}, "step": {"cmd": "decode"}}


def shared_memory() -> set[str]:
    """What is in shared memory, but the empty files by which all engines since the boot claim cores."""
    return set(os.listdir("/dev/shm")) - {claims_folder().name}


@dataclass
class Observed:
    """A Ray, and a process that looks at it."""

    ray: OwnRay
    process: subprocess.Popen[str]
    shared_memory: set[str] = field(default_factory=shared_memory)

    def ask(self, question: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def nothing_left(self) -> bool:
        new_memory = shared_memory() - self.shared_memory
        return self.ask("left") == {"actors": [], "groups": [], "used": 0.0} and not new_memory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), "mixtral")


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    with OwnRay(tmp_path_factory.mktemp("ray")) as own:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.ray_observer", own.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **own.entry},
        )
        observed = Observed(own, process)
        observed.ask("left")
        yield observed
        process.communicate()


def start(model: Path, ray: OwnRay, then: str, *faults: dict[str, Any], **settings: Any) -> Run:
    """The script with an engine of two ranks."""
    whole = {**settings_for(ray), "faults": list(faults), **settings}
    given = {"model": str(model), "then": then, "settings": whole}
    return Run([sys.executable, "-m", "tests.cleanup_driver", json.dumps(given)], **ray.entry)


def settings_for(ray: OwnRay) -> dict[str, Any]:
    own = {"name": NAME, "ep_size": 2, "num_cpus_per_rank": 1, "device": "cpu", "idle_ping_s": 0.5}
    return {**own, "address": ray.address}


def cases() -> Iterator[Any]:
    """All of them; a few, in which each victim, means and phase occurs, in the default run."""
    for victim in VICTIMS:
        for means in MEANS:
            for phase in PHASES:
                marks = [] if (victim, means, phase) in BY_DEFAULT else [pytest.mark.nightly]
                yield pytest.param(victim, means, phase, marks=marks, id=f"{victim}-{means}-{phase}")


@pytest.mark.parametrize(("victim", "means", "phase"), list(cases()))
def test_nothing_is_left_of_an_engine(model: Path, observed: Observed, victim: str, means: str, phase: str) -> None:
    if means == "exception":
        run, pids = start_to_fail(model, observed, victim, phase), []
    else:
        run, pids = start_and_wait(model, observed, phase)
        os.kill({"driver": run.process.pid, "head": pids[0], "worker": pids[1]}[victim], SIGNALS[means])
    check_end(observed, run, pids, what_is_noticed(victim, means, phase))


@pytest.mark.nightly
@pytest.mark.parametrize(("victim", "phase"), [("driver", "idle"), ("head", "step")])
def test_nothing_is_left_when_the_worker_was_stopped_before(
    model: Path, observed: Observed, victim: str, phase: str
) -> None:
    run, pids = start_and_wait(model, observed, phase)
    os.kill(pids[1], signal.SIGSTOP)
    os.kill(run.process.pid if victim == "driver" else pids[0], signal.SIGKILL)
    check_end(observed, run, pids)


def test_a_name_that_is_taken_is_refused_and_the_engine_that_has_it_goes_on(model: Path, observed: Observed) -> None:
    first, pids = start_and_wait(model, observed, "idle")
    second = start(model, observed.ray, "idle").wait()
    assert second.returncode == 1
    assert f"StartError: an engine named '{NAME}' runs on this Ray already" in second.stderr
    assert observed.ask(f"ranks {NAME} 2") == {"pids": pids, "phase": "ready"}
    check_end(observed, first, pids)
    assert first.process.returncode == 0


@pytest.mark.clusters
@pytest.mark.timeout(1200)
def test_many_starts_in_a_row_leave_the_script_and_ray_as_they_were(
    model: Path, observed: Observed, scale: int
) -> None:
    num_starts = NUM_STARTS * scale
    given = json.dumps({"model": str(model), "settings": settings_for(observed.ray)})
    run = Run([sys.executable, "-m", "tests.starts_driver", str(num_starts), given], **observed.ray.entry)
    done = run.wait(1100)
    assert done.returncode == 0, done.stderr
    held = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(held) == num_starts
    first, last = held[0], held[-1]
    assert last["threads"] <= first["threads"]
    assert last["descriptors"] <= first["descriptors"] + 2  # Ray's own connections come and go
    assert last["resident_bytes"] - first["resident_bytes"] < 2**20 * (8 + num_starts)
    assert until(observed.nothing_left, LEFT_S), observed.ask("left")


def what_is_noticed(victim: str, means: str, phase: str) -> str:
    """The error that a script which waits for its engine must end with by itself. Ranks take no notice of SIGINT."""
    if victim == "driver" or means == "int" or phase == "idle":
        return ""
    return "StartError" if phase == "load" else "EngineDead"


def start_to_fail(model: Path, observed: Observed, victim: str, phase: str) -> Run:
    """A script in which something raises in this phase: itself, or a rank."""
    if victim != "driver":
        fault = {"rank": VICTIMS.index(victim) - 1, "phase": "validation", "kind": "leave", **EXCEPTION[phase]}
        return start(model, observed.ray, "idle" if phase == "load" else phase, fault)
    if phase == "load":  # the start takes too long, which the script's own process finds
        return start(model, observed.ray, "idle", stuck("load"), start_timeout_s=8.0)
    return start(model, observed.ray, "raise" if phase == "idle" else "raise in step")


def start_and_wait(model: Path, observed: Observed, phase: str) -> tuple[Run, list[int]]:
    """A script that has come to this phase, and the process ids of its ranks."""
    faults = [stuck(phase)] if phase in STUCK else []
    run = start(model, observed.ray, "step" if phase == "step" else "idle", *faults)
    wanted = "loading" if phase == "load" else "ready"
    seen: list[Any] = []

    def is_there() -> bool:
        seen[:] = [observed.ask(f"ranks {NAME} 2")]
        return seen[0] is not None and seen[0]["phase"] == wanted

    assert until(lambda: is_there() or run.process.poll() is not None, START_S), run.errors()
    assert run.process.poll() is None, run.errors()
    if phase == "step":
        assert run.process.stdout is not None
        assert [run.process.stdout.readline() for _ in range(2)] == ["ready\n", "token\n"]
    return run, seen[0]["pids"]


def stuck(phase: str) -> dict[str, Any]:
    """A worker that takes very long in this phase."""
    return {"rank": 1, "kind": "slow", "seconds": STUCK_S, **STUCK[phase]}


def check_end(observed: Observed, run: Run, pids: list[int], must_notice: str = "") -> None:
    """The script ends, and then everything else does. `must_notice` is what its last line must say."""
    if run.process.stdin is not None and run.process.poll() is None:
        with contextlib.suppress(BrokenPipeError):  # it has ended just now
            run.process.stdin.write("\n")  # a script that only waits for this may go on to its end
            run.process.stdin.flush()
    # Where something raises by itself, the script has only just begun.
    noticed = until(lambda: run.process.poll() is not None, ENDS_S if pids else START_S)
    if not noticed:
        run.process.send_signal(signal.SIGINT)
    done = run.wait(60)
    if must_notice:
        assert noticed, done.stderr
        assert must_notice in done.stderr.splitlines()[-1], done.stderr
    assert until(lambda: not any(map(is_running, pids)) and not run.left(), LEFT_S), (pids, run.left())
    assert until(observed.nothing_left, LEFT_S), observed.ask("left")
