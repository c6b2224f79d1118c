# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which nodes of a cluster have joined Ray, which are missing, and why, as far as anybody knows.

Rules. A node has joined when Ray counts it as alive, whatever the autoscaler says. It is given up when the autoscaler
does not try it again, and then there is nothing to wait for. Time, files and Ray are the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from metrale_ray.deploying.expected import ExpectedNodes
from metrale_ray.deploying.monitor_log import Failure, MonitorLog, NodeLog, is_address

STATES = {
    "uninitialized": "its setup has not begun",
    "waiting-for-ssh": "it is not reached by ssh yet",
    "syncing-files": "files are copied to it",
    "setting-up": "its setup commands run",
    "update-failed": "its setup failed",
    "up-to-date": "Ray was started there and has not joined: see /tmp/ray/session_latest/logs on it, and whether it "
    "reaches the ports of the head",
}
"""What the autoscaler calls the states of a node, in words."""

STARTED = "up-to-date"
NUM_ERROR_LINES = 6
MAX_TEXT = 200  # characters of a command, or of a line of its output

AGAIN = "such a node is not tried again by itself: mend it, then `ray down FILE` and `ray up FILE`"


@dataclass(frozen=True, slots=True)
class Sight:
    """What was seen at one moment: addresses that are alive in Ray, the autoscaler's state of each node by its id, its
    logs, and its own end if it has ended. `addresses`: of nodes with other names. `gone`: addresses that were alive,
    with what Ray says of their end."""

    alive: frozenset[str]
    states: Mapping[str, str] = field(default_factory=dict)
    monitor: MonitorLog = field(default_factory=MonitorLog)
    autoscaler_error: str | None = None
    addresses: Mapping[str, str] = field(default_factory=dict)
    gone: Mapping[str, str] = field(default_factory=dict)

    def address(self, name: str) -> str:
        """Where the node is, as far as it is known."""
        return self.addresses.get(name) or self.monitor.addresses.get(name) or name


@dataclass(frozen=True, slots=True)
class Outlook:
    """`joined` and `missing` (name and reason) nodes; `is_over` when no more will come by themselves."""

    expected: ExpectedNodes
    joined: tuple[str, ...]
    missing: tuple[tuple[str, str], ...]
    is_over: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether all are there."""
        return not self.missing

    def count(self) -> str:
        """How many have joined."""
        return f"{self.expected.num_nodes - self._num_missing()} of {self.expected.num_nodes} nodes have joined"

    def summary(self) -> str:
        """One line for people who wait."""
        waiting = ", ".join(name for name, _ in self.missing)
        return f"{self.count()}; waiting for {waiting}" if waiting else self.count()

    def failure(self, timeout_s: float) -> str:
        """A line on what is missing, and one on each node."""
        when = "no more will come" if self.is_over else f"{timeout_s:g} s have passed"
        lines = [f"{self.count()}, and {when}", *(f"{name}: {why}" for name, why in self.missing)]
        return "\n".join([*lines, *([AGAIN] if self.is_over else [])])

    def _num_missing(self) -> int:
        if self.expected.names:
            return len(self.missing)
        return max(0, self.expected.num_nodes - len(self.joined))


def outlook(expected: ExpectedNodes, sight: Sight) -> Outlook:
    """Who is there, and who is not."""
    if not expected.names:
        return _by_number(expected, sight)
    joined = tuple(name for name in expected.names if sight.address(name) in sight.alive)
    missing = [name for name in expected.names if name not in joined]
    reasons = tuple((name, _reason(name, sight)) for name in missing)
    is_over = any(sight.monitor.nodes.get(name, NodeLog()).is_given_up for name in missing)
    return Outlook(expected, joined, reasons, is_over or (bool(missing) and sight.autoscaler_error is not None))


def _by_number(expected: ExpectedNodes, sight: Sight) -> Outlook:
    """Nodes without names: a cloud's autoscaler replaces one that failed, so that only its own end is an end."""
    joined = tuple(sorted(sight.alive))
    num_missing = expected.num_nodes - len(joined)
    if num_missing <= 0:
        return Outlook(expected, joined, ())
    known = [name for name in (*sight.states, *sight.monitor.nodes) if sight.address(name) not in sight.alive]
    missing = [(name, _reason(name, sight)) for name in dict.fromkeys(known)]
    unknown = f"{num_missing} node{'s' if num_missing > 1 else ''}"
    if not missing or sight.monitor.not_launched or sight.autoscaler_error:
        missing.append((unknown, _of_the_whole(sight)))
    return Outlook(expected, joined, tuple(missing), sight.autoscaler_error is not None)


def _reason(name: str, sight: Sight) -> str:
    """Why a node is not there."""
    log = sight.monitor.nodes.get(name) or sight.monitor.nodes.get(sight.address(name)) or NodeLog()
    state = sight.states.get(name) or sight.states.get(sight.address(name))
    if log.failure is not None and (log.num_failed or state == "update-failed"):
        return _failed(log, log.failure, sight.monitor.errors)
    if log.ssh is not None and (log.is_given_up or state in (None, "waiting-for-ssh", "update-failed")):
        end = "; it was given up" if log.is_given_up else ""
        return f"ssh does not reach it: {_short(log.ssh.rstrip('.'))}{end}"
    if log.is_given_up:
        return "the autoscaler has given it up; monitor.log among Ray's logs on the head has more"
    if sight.address(name) in sight.gone and state in (None, STARTED):
        return _gone(sight.gone[sight.address(name)])
    if state == STARTED:
        return STATES[STARTED] + _strangers(sight)
    if state is not None:
        return STATES.get(state, f"its state is {state}")
    if sight.addresses.get(name) == name and not is_address(name):
        return "nobody knows a machine of this name here; give its address"
    return _of_the_whole(sight)


def _gone(told: str) -> str:
    why = f": {_short(told.rstrip('.'))}" if told else ""
    return f"it joined and has gone{why}; see raylet.out among Ray's logs on it"


def _strangers(sight: Sight) -> str:
    """A machine with several addresses may have joined by one that was not meant."""
    others = sorted(sight.alive - set(sight.addresses.values())) if sight.addresses else []
    return f"; there are nodes at other addresses, and one may be this: {', '.join(others)}" if others else ""


def _failed(log: NodeLog, failure: Failure, errors: list[str]) -> str:
    command = f" (`{_short(failure.command)}`)" if failure.command else ""
    times = f" {log.num_failed} times" if log.num_failed > 1 else ""
    told = _output(failure, errors)
    return f"{failure.step}{command} failed{times}{': ' + told if told else ''}"


def _output(failure: Failure, errors: list[str]) -> str:
    """What the command wrote; where that is nothing, what all nodes' commands wrote to stderr."""
    of_several = " (or from commands of other nodes)"
    if failure.output:
        return _joined(failure.output) + (of_several if failure.is_shared else "")
    if errors:
        return _joined(tuple(errors[-NUM_ERROR_LINES:])) + of_several
    return ""


def _of_the_whole(sight: Sight) -> str:
    """Where nothing is known of one node."""
    if sight.autoscaler_error is not None:
        lines = [line for line in sight.autoscaler_error.splitlines() if line.strip()]
        return f"the autoscaler has ended: {_short(lines[-1] if lines else 'no reason given')}"
    if sight.monitor.not_launched:
        return _short(sight.monitor.not_launched[-1])
    return "the autoscaler has not begun with it, as far as is known here; its logs are on the head"


def _joined(lines: tuple[str, ...]) -> str:
    return " | ".join(_short(line) for line in lines)


def _short(told: str) -> str:
    text = " ".join(told.split())  # a command may have several lines
    text = "".join(letter for letter in text if letter.isprintable())  # a terminal would obey the others
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
