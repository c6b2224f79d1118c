# SPDX-License-Identifier: MIT OR Apache-2.0
"""`metrale-ray cluster wait`: its flags, its patience, and what it writes. The cluster is played."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from metrale_ray import cli, cli_wait
from metrale_ray.cli_wait import expected_nodes, until_joined
from metrale_ray.deploying import ray_view
from metrale_ray.deploying.expected import ExpectedNodes
from metrale_ray.deploying.monitor_log import Failure, MonitorLog, NodeLog
from metrale_ray.deploying.waiting import Sight
from metrale_ray.errors import UserError

HEAD, OTHER = "10.0.0.1", "10.0.0.2"
EXPECTED = ExpectedNodes((HEAD, OTHER), 2)
GIVEN_UP = MonitorLog({OTHER: NodeLog(1, True, Failure("Setup commands", "check", ("no python",)))})


class PlayedTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


def play(sights: Iterator[Sight], timeout_s: float) -> tuple[Any, PlayedTime, list[str]]:
    time, shown = PlayedTime(), list[str]()
    last = until_joined(
        EXPECTED,
        lambda: next(sights),
        timeout_s,
        lambda now: shown.append(now.summary()),
        clock=time.clock,
        sleep=time.sleep,
    )
    return last, time, shown


def test_the_wait_ends_as_soon_as_all_are_there() -> None:
    last, time, shown = play(iter([Sight(frozenset({HEAD})), Sight(frozenset({HEAD, OTHER}))]), 60)
    assert last.is_complete
    assert time.now_s == cli_wait.LOOK_EVERY_S
    assert shown == [f"1 of 2 nodes have joined; waiting for {OTHER}", "2 of 2 nodes have joined"]


def test_the_wait_ends_at_once_when_a_node_was_given_up() -> None:
    last, time, _ = play(iter([Sight(frozenset({HEAD}), monitor=GIVEN_UP)]), 60)
    assert (last.is_over, time.now_s) == (True, 0.0)


@pytest.mark.parametrize("timeout_s", [0.5, 1.0, 3.25])
def test_the_wait_ends_at_its_limit_after_one_more_look(timeout_s: float) -> None:
    last, time, shown = play(iter([Sight(frozenset({HEAD}))] * 10), timeout_s)
    assert not last.is_complete
    assert time.now_s == timeout_s
    assert len(shown) == int(timeout_s) + 2 - (timeout_s == int(timeout_s))


class PlayedView:
    """What `RayView` is asked, with one sight."""

    sight = Sight(frozenset({HEAD, OTHER}))
    asked: tuple[str, ExpectedNodes]

    def __init__(self, address: str, expected: ExpectedNodes) -> None:
        type(self).asked = (address, expected)

    def __enter__(self) -> PlayedView:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def look(self) -> Sight:
        return self.sight


@pytest.fixture
def view(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[PlayedView]:
    monkeypatch.setattr(PlayedView, "sight", PlayedView.sight)
    monkeypatch.setattr(ray_view, "RayView", PlayedView)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return PlayedView


def test_all_nodes_there_is_one_line_and_exit_code_0(
    view: type[PlayedView], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cluster", "wait", "--nodes", f"{HEAD},{OTHER}", "--address", "10.0.0.1:6379"]) == 0
    assert capsys.readouterr().out == f"2 of 2 nodes have joined: {HEAD}, {OTHER}\n"
    assert view.asked == ("10.0.0.1:6379", EXPECTED)


def test_the_ray_of_this_machine_and_the_yaml_of_ray_up_are_the_defaults(
    view: type[PlayedView], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"cluster_name": "own", "provider": {"head_ip": HEAD, "worker_ips": [OTHER]}}
    (tmp_path / "ray_bootstrap_config.yaml").write_text(yaml.safe_dump(config))
    assert cli.main(["cluster", "wait"]) == 0
    assert view.asked == ("auto", ExpectedNodes((HEAD, OTHER), 2, "own"))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    assert cli.main(["cluster", "wait"]) == 0
    assert view.asked[0] == "10.0.0.9:6379"


def test_a_node_that_was_given_up_is_exit_code_3_with_its_name_and_reason(
    view: type[PlayedView], capsys: pytest.CaptureFixture[str]
) -> None:
    view.sight = Sight(frozenset({HEAD}), monitor=GIVEN_UP)
    assert cli.main(["cluster", "wait", "--nodes", f"{HEAD},{OTHER}"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    *before, last = err.splitlines()
    assert before == [
        f"1 of 2 nodes have joined; waiting for {OTHER}",
        f"  {OTHER}: Setup commands (`check`) failed: no python",
    ]
    assert last.startswith(
        f"error: 1 of 2 nodes have joined, and no more will come; {OTHER}: Setup commands (`check`) failed: no python; "
    )
    assert last.endswith("mend it, then `ray down FILE` and `ray up FILE`")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "there is no ~/ray_bootstrap_config.yaml, which `ray up` leaves on the head"),
        (["--nodes", "2", "--file", "x"], "leave one of the two out"),
        (["--nodes", "0"], "--nodes is '0'"),
        (["--file", "absent.yaml"], "--file is 'absent.yaml'"),
        (["--nodes", "2", "--timeout-s", "-1"], "must be a number of seconds above 0"),
    ],
)
def test_a_mistake_is_exit_code_2_and_names_its_flag(
    view: type[PlayedView], capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert cli.main(["cluster", "wait", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_which_nodes_are_meant_is_asked_before_ray_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match="give --file or --nodes"):
        expected_nodes({})


def test_lines_come_with_each_change_and_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    time = PlayedTime()
    sights = [Sight(frozenset({HEAD}))] * 25 + [Sight(frozenset({HEAD, OTHER}))]
    with cli_wait._Progress(time.clock) as progress:
        left = iter(sights)
        until_joined(EXPECTED, lambda: next(left), 60, progress.show, clock=time.clock, sleep=time.sleep)
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(" ")]
    assert lines == [f"1 of 2 nodes have joined; waiting for {OTHER}"] * 3 + ["2 of 2 nodes have joined"]


class Terminal(io.StringIO):
    """Where a person looks."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_changes_and_a_name_is_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(cli_wait.sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    expected = ExpectedNodes(("[bold]x",), 1)
    with cli_wait._Progress() as progress:
        progress.show(cli_wait.outlook(expected, Sight(frozenset())))
        progress._status.stop()
    assert "waiting for [bold]x" in terminal.getvalue()
