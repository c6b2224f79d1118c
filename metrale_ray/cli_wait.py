# SPDX-License-Identifier: MIT OR Apache-2.0
"""`metrale-ray cluster wait`: until all nodes of a cluster have joined Ray, or one of them never will.

Rules. It runs on the head, where the autoscaler keeps its logs: `ray exec FILE 'metrale-ray cluster wait'`. Exit code 0
with all nodes there, 3 when the time has passed or the autoscaler has given a node up: then each node that is missing
is named with the reason. Nothing is started or changed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from metrale_ray.cli_flags import Flag, seconds
from metrale_ray.cli_token import use_cluster_token
from metrale_ray.deploying import expected as expecting
from metrale_ray.deploying.expected import BOOTSTRAP_CONFIG, ExpectedNodes
from metrale_ray.deploying.waiting import Outlook, outlook
from metrale_ray.errors import StartError, UserError

if TYPE_CHECKING:
    from metrale_ray.deploying.waiting import Sight

TIMEOUT_S = 300.0
LOOK_EVERY_S = 1.0
LINE_EVERY_S = 10.0  # where there is no terminal
THIS_MACHINES = "auto"  # the Ray that runs here

WAIT_FLAGS = (
    Flag(("--file",), f"YAML of the cluster, as for `ray up` (default: {BOOTSTRAP_CONFIG})", metavar="FILE"),
    Flag(
        ("--nodes",), "instead of --file: how many nodes, or their addresses with commas between them", metavar="NODES"
    ),
    Flag(("--timeout-s",), f"seconds until the wait has failed (default: {TIMEOUT_S:g})", seconds, "S"),
    Flag(("--address",), "Ray's address (default: RAY_ADDRESS, or the Ray on this machine)"),
)


def wait(given: Mapping[str, Any], answers: TextIO) -> int:
    """Wait, and write what has joined. Raises UserError, StartError."""
    expected = expected_nodes(given)
    address = given.get("address") or os.environ.get("RAY_ADDRESS") or THIS_MACHINES
    use_cluster_token()
    from metrale_ray.deploying.ray_view import RayView

    timeout_s = given.get("timeout_s", TIMEOUT_S)
    with RayView(address, expected) as view, _Progress() as progress:
        last = until_joined(expected, view.look, timeout_s, progress.show)
    if not last.is_complete:
        raise StartError(last.failure(timeout_s))
    answers.write(f"{last.count()}: {', '.join(last.joined)}\n")
    answers.flush()
    return 0


def expected_nodes(given: Mapping[str, Any]) -> ExpectedNodes:
    """The nodes that the flags mean. Raises UserError."""
    if "nodes" in given and "file" in given:
        raise UserError("--file and --nodes both say which nodes to wait for; leave one of the two out")
    if "nodes" in given:
        return expecting.from_flag(given["nodes"])
    if "file" not in given and not Path(BOOTSTRAP_CONFIG).expanduser().exists():
        raise UserError(
            f"there is no {BOOTSTRAP_CONFIG}, which `ray up` leaves on the head; "
            "run this there, or give --file or --nodes"
        )
    return expecting.from_file(given.get("file", BOOTSTRAP_CONFIG))


def until_joined(
    expected: ExpectedNodes,
    look: Callable[[], Sight],
    timeout_s: float,
    show: Callable[[Outlook], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Outlook:
    """Look again and again, until all nodes are there, no more will come, or the time has passed."""
    deadline = clock() + timeout_s
    while True:
        now = outlook(expected, look())
        show(now)
        left_s = deadline - clock()
        if now.is_complete or now.is_over or left_s <= 0:
            return now
        sleep(min(LOOK_EVERY_S, left_s))


class _Progress:
    """A line that changes on a terminal; elsewhere a line for each change, and now and then for those who wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._status: Any = None
        self._shown = ""
        self._next_s = 0.0

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True).status("looking for nodes")
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, now: Outlook) -> None:
        """Tell how far it is."""
        if self._status is not None:
            from rich.markup import escape

            self._status.update(escape(now.summary()))
            return
        lines = "\n".join([now.summary(), *(f"  {name}: {why}" for name, why in now.missing)])
        if lines != self._shown or self._clock() >= self._next_s:
            self._shown, self._next_s = lines, self._clock() + LINE_EVERY_S
            print(lines, file=sys.stderr, flush=True)
