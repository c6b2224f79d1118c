# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the logs of Ray's autoscaler say of each node that it sets up: which command failed there, with what output, and
whether it will be tried again.

Rules. `monitor.log` is the autoscaler's own account, `monitor.out` has the updaters' lines with the output of the
commands between them, `monitor.err` what ssh itself had to say. Updaters of several nodes write at the same time:
output is a node's own for sure only while no other node's command runs, and is told to be of several otherwise. Lines
that are not understood are left out. Both of Ray's autoscalers are read.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # and what moves and hides the cursor
HEADER = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\s+[A-Z]+ \S+ -- "
RECORD = re.compile(rf"{HEADER}(.*)")
JOINED = re.compile(rf"(?<!\n)(?={HEADER})")  # two updaters that write at once may share a line
ATTEMPTS = 3
"""Of the newer autoscaler for one node, after which it gives the node up. The older one has a single attempt."""
NUM_OUTPUT_LINES = 6
MAX_COMMAND_LEN = 1 << 15

SPAWNED = re.compile(r"updater thread for node (\S+)\.$")
INSTALLING = re.compile(r"->RAY_INSTALLING \(.*cloud_instance_id=([^,]+),")
ATTEMPT_FAILED = re.compile(r"Ray installation failed on instance (\S+): ")
GIVEN_UP = (
    re.compile(r"->RAY_INSTALL_FAILED \(.*cloud_instance_id=([^,]+),"),
    re.compile(r"Terminating the node with id (\S+) and ip \S+\. \(launch failed\)"),
)
NOT_LAUNCHED = (
    re.compile(r"(Failed to launch \d+ node\(s\) of type .*)"),
    re.compile(r"->ALLOCATION_FAILED \(.*?\): (.*)"),
)

WITHOUT_END = re.compile(r"Full traceback:|\(\d+/\d+\) ")  # what has several lines and no mark at its end
FETCHED = re.compile(r"Fetched IP: (\S+)")
GOT_ADDRESS = re.compile(r"NodeUpdater: (\S+): Got IP ")
COMMAND = re.compile(r"Full command is `.*?ConnectTimeout=\d+s \S+?@(\S+)(?: (.*))?$", re.DOTALL)
ENDED = re.compile(r"NodeUpdater: (\S+): (.+) (succeeded|failed) \[LogTimer=")
SSH_TEST = "uptime"  # Ray tries ssh with it
EXPORTS = re.compile(r"(?:export RAY_\w+=[^;]*; )*")

SSH_SAYS = (re.compile(r"ssh: connect to host (\S+) port \d+: (.+)"), re.compile(r"\S+@(\S+): (Permission denied .+)"))
SSH_CHATTER = ("Warning: Permanently added ", "Shared connection to ", "Connection to ")


@dataclass(frozen=True, slots=True)
class Failure:
    """What failed on a node: Ray's `step`, the `command`, the last lines of its `output`.

    `is_shared`: commands of other nodes ran meanwhile, so that lines of the output may be theirs.
    """

    step: str
    command: str | None
    output: tuple[str, ...]
    is_shared: bool = False


@dataclass(slots=True)
class NodeLog:
    """What is known of one node. `is_given_up`: it is not tried again. `ssh`: what ssh said last of it."""

    num_failed: int = 0
    is_given_up: bool = False
    failure: Failure | None = None
    ssh: str | None = None


@dataclass(slots=True)
class MonitorLog:
    """All nodes by the autoscaler's own ids (addresses on one's own machines), the address of each id as far as it is
    known, what could not be launched at all, and lines of stderr that name no node."""

    nodes: dict[str, NodeLog] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    not_launched: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def of(self, node: str) -> NodeLog:
        """What is known of `node`."""
        return self.nodes.setdefault(node, NodeLog())


def read_monitor(log: str, out: str, err: str, addresses: Mapping[str, str]) -> MonitorLog:
    """The texts of monitor.log, monitor.out and monitor.err, or their last parts, as what they say of nodes.

    `addresses`: of nodes whose ids are known; those of others are found in the log.
    """
    found = MonitorLog(addresses=dict(addresses))
    for text in log.splitlines():
        _account(found, text)
    _Updaters(found).read(out)
    _complaints(found, err)
    return found


def _account(found: MonitorLog, text: str) -> None:
    """One line of monitor.log."""
    if match := INSTALLING.search(text):  # a new round of attempts
        found.of(match[1]).num_failed, found.of(match[1]).is_given_up = 0, False
    elif match := SPAWNED.search(text):
        found.of(match[1]).is_given_up = False
    elif match := ATTEMPT_FAILED.search(text):
        found.of(match[1]).num_failed += 1
        found.of(match[1]).is_given_up = found.of(match[1]).num_failed >= ATTEMPTS
    elif match := _first(GIVEN_UP, text):
        found.of(match[1]).is_given_up = True
        found.of(match[1]).num_failed = max(1, found.of(match[1]).num_failed)
    elif (match := _first(NOT_LAUNCHED, text)) and match[1] not in found.not_launched:
        found.not_launched.append(match[1])


def _first(patterns: tuple[re.Pattern[str], ...], text: str) -> re.Match[str] | None:
    return next((match for pattern in patterns if (match := pattern.search(text))), None)


@dataclass(slots=True)
class _Running:
    """A command that runs on a node now."""

    command: str
    output: list[str] = field(default_factory=list)
    is_shared: bool = False


class _Updaters:
    """Reads monitor.out: records, and between them the output of commands."""

    def __init__(self, found: MonitorLog) -> None:
        self._found = found
        self._running: dict[str, _Running] = {}  # by address
        self._fetched: str | None = None

    def read(self, text: str) -> None:
        """All of it."""
        for record, output in _records(text):
            if record is not None:
                self._note(record)
            for line in output:
                self._output(line)

    def _note(self, record: str) -> None:
        if match := FETCHED.search(record):
            self._fetched = match[1]
        elif match := GOT_ADDRESS.search(record):
            if self._fetched is not None and not is_address(match[1]):
                self._found.addresses.setdefault(match[1], self._fetched)
            self._fetched = None
        elif match := COMMAND.search(record):
            self._begin(match[1], _own_part(match[2] or ""))
        elif match := ENDED.search(record):
            self._end(match[1], match[2], has_failed=match[3] == "failed")

    def _begin(self, address: str, command: str) -> None:
        self._running.pop(address, None)
        if command != SSH_TEST:
            self._running[address] = _Running(command)

    def _end(self, node: str, step: str, *, has_failed: bool) -> None:
        running = self._running.pop(self._found.addresses.get(node, node), None)
        if not has_failed:
            self._found.of(node).failure = None
        elif running is None:
            self._found.of(node).failure = Failure(step, None, ())
        else:
            output = tuple(running.output[-NUM_OUTPUT_LINES:])
            self._found.of(node).failure = Failure(step, running.command, output, running.is_shared)

    def _output(self, line: str) -> None:
        for running in self._running.values():
            running.output.append(line)
            running.is_shared |= len(self._running) > 1


def _records(text: str) -> Iterator[tuple[str | None, list[str]]]:
    """Each record of the log with the lines behind it that are no part of it. None: what came before the first."""
    record: list[str] | None = None  # its lines
    output: list[str] = []
    is_open = False  # the record goes on in the next line
    for line in JOINED.sub("\n", COLOURS.sub("", text)).splitlines():
        if match := RECORD.match(line):
            yield _whole(record), output
            record, output = [match[1]], []
            is_open = bool(WITHOUT_END.match(match[1])) or match[1].count("`") == 1
        elif is_open and record is not None:
            record.append(line)
            is_open = bool(WITHOUT_END.match(record[0])) or not line.endswith("`")
        elif line.strip():
            output.append(line.strip())
    yield _whole(record), output


def _whole(record: list[str] | None) -> str | None:
    return None if record is None else "\n".join(record)


def _own_part(told: str) -> str:
    """The user's own command out of what ssh was given: without Ray's shell around it and its variables."""
    told = told.rstrip("`")[:MAX_COMMAND_LEN]  # what is longer is no command, but a record whose end was not seen
    try:
        words = shlex.split(told)
    except ValueError:  # cut off
        return told
    inner = re.search(r"&& \((.*)\)$", words[-1] if words else "", re.DOTALL)
    command = inner[1] if inner else told
    return command[EXPORTS.match(command).end() :]  # type: ignore[union-attr]  # it matches nothing at least


def _complaints(found: MonitorLog, err: str) -> None:
    """What ssh and commands wrote to stderr."""
    for line in COLOURS.sub("", err).splitlines():
        text = line.strip()
        if match := _first(SSH_SAYS, text):
            found.of(_id_of(found, match[1])).ssh = match[2]
        elif text and not RECORD.match(text) and not text.startswith(SSH_CHATTER):
            found.errors.append(text)


def is_address(node: str) -> bool:
    """Whether a node's name is an IP address."""
    try:
        ipaddress.ip_address(node)
    except ValueError:
        return False
    return True


def _id_of(found: MonitorLog, address: str) -> str:
    return next((node for node, known in found.addresses.items() if known == address), address)
