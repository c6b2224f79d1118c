# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the autoscaler's logs say of each node: logs of real failures, and lines that are put together here."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.deploying.monitor_log import ATTEMPTS, Failure, MonitorLog, is_address, read_monitor

LOGS = Path(__file__).parents[1] / "fixtures" / "autoscaler"
SSH = "ssh -tt -o StrictHostKeyChecking=no -o ConnectTimeout=120s me@{} bash --login -c -i {}"
SHELL = "'source ~/.bashrc; export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore && ({})'"


@cache
def real(name: str) -> MonitorLog:
    texts = ((LOGS / name / f"monitor.{end}").read_bytes().decode() for end in ("log", "out", "err"))
    return read_monitor(*texts, {})


def record(text: str, level: str = "INFO") -> str:
    return f"2026-11-30 20:48:31,571\t{level} updater.py:345 -- {text}"


def begins(address: str, command: str) -> str:
    return record(f"Full command is `\x1b[1m{SSH.format(address, SHELL.format(command))}\x1b[22m`", "VVINFO")


def ends(node: str, step: str = "Setup commands", how: str = "failed") -> str:
    return record(f"NodeUpdater: {node}: {step} {how} [LogTimer=13ms]")


def out(*lines: str, addresses: dict[str, str] | None = None) -> MonitorLog:
    return read_monitor("", "\n".join(lines), "", addresses or {})


def log(*lines: str) -> MonitorLog:
    return read_monitor("\n".join(record(line) for line in lines), "", "", {})


# Logs of real failures


def test_a_setup_command_that_failed_is_found_with_its_output_and_its_node_is_given_up() -> None:
    found = real("setup_failed").nodes
    command = 'test "$(hostname)" != node3 || { echo "there is no disk"; exit 9; }'
    assert found["10.77.6.3"].failure == Failure("Setup commands", command, ("there is no disk",), is_shared=True)
    assert found["10.77.6.3"].is_given_up
    assert (found["10.77.6.2"].failure, found["10.77.6.2"].is_given_up) == (None, False)
    assert real("setup_failed").errors == []  # nothing but ssh's chatter


@pytest.mark.parametrize(("name", "num_failed"), [("older", 1), ("newer", ATTEMPTS)])
def test_both_autoscalers_give_a_node_up_that_failed_in_each_of_their_attempts(name: str, num_failed: int) -> None:
    found = real(name).nodes
    given_up = {node: known.num_failed for node, known in found.items() if known.is_given_up}
    assert given_up == {"10.9.0.2": num_failed, "10.9.0.4": num_failed}


@pytest.mark.parametrize("name", ["older", "newer"])
def test_each_node_has_its_own_reason(name: str) -> None:
    found = real(name).nodes
    setup, start = found["10.9.0.2"].failure, found["10.9.0.4"].failure
    assert setup is not None
    assert start is not None
    assert (setup.step, setup.command) == ("Setup commands", "check-venv --venv /opt/venv")
    assert setup.output[-1] == "no python environment at /opt/venv; set --venv"
    assert (start.step, start.command) == ("Ray start commands", "ray start --address=$RAY_HEAD_IP:6379")
    assert [line for line in start.output if line.startswith("Ray:")] == ["Ray: 2.60.0", "Ray: 2.50.0"]
    assert {node: known.ssh for node, known in found.items() if known.ssh} == {
        "10.9.0.3": "Connection refused",
        "10.9.0.5": "No route to host",
        "10.9.0.6": "Permission denied (publickey).",
    }


@given(st.integers(0, 4000), st.sampled_from(["older", "newer", "setup_failed"]))
def test_logs_that_begin_in_the_middle_are_read(start: int, name: str) -> None:
    texts = [(LOGS / name / f"monitor.{end}").read_bytes()[start:].decode() for end in ("log", "out", "err")]
    found = read_monitor(*texts, {})
    assert set(found.nodes) <= set(real(name).nodes)


@given(st.text(), st.text(), st.text())
def test_any_text_is_read(log: str, out: str, err: str) -> None:
    read_monitor(log, out, err, {})


# monitor.out


def test_the_output_of_a_command_is_what_stands_between_the_records() -> None:
    found = out(begins("10.0.0.2", "check"), "one\r", "", "\x1b[31mtwo\x1b[0m\r", ends("10.0.0.2"))
    assert found.nodes["10.0.0.2"].failure == Failure("Setup commands", "check", ("one", "two"))


def test_output_while_commands_of_two_nodes_run_may_be_of_either() -> None:
    found = out(begins("10.0.0.2", "a"), begins("10.0.0.3", "b"), "x", ends("10.0.0.2"), "y", ends("10.0.0.3"))
    assert found.nodes["10.0.0.2"].failure == Failure("Setup commands", "a", ("x",), is_shared=True)
    assert found.nodes["10.0.0.3"].failure == Failure("Setup commands", "b", ("x", "y"), is_shared=True)


def test_the_test_of_ssh_is_no_command_whose_output_counts() -> None:
    found = out(begins("10.0.0.2", "check"), begins("10.0.0.3", "uptime"), "x", ends("10.0.0.2"))
    assert found.nodes["10.0.0.2"].failure == Failure("Setup commands", "check", ("x",))


def test_a_step_that_succeeds_later_is_no_failure() -> None:
    again = (begins("10.0.0.2", "check"), "x", ends("10.0.0.2"))
    assert out(*again, *again[:-1], ends("10.0.0.2", how="succeeded")).nodes["10.0.0.2"].failure is None


def test_a_failure_whose_command_was_not_seen_is_told_by_its_step() -> None:
    assert out(ends("10.0.0.2")).nodes["10.0.0.2"].failure == Failure("Setup commands", None, ())


def test_the_last_lines_of_much_output_are_kept() -> None:
    found = out(begins("10.0.0.2", "check"), *(f"line {number}" for number in range(100)), ends("10.0.0.2"))
    failure = found.nodes["10.0.0.2"].failure
    assert failure is not None
    assert failure.output == tuple(f"line {number}" for number in range(94, 100))


def test_a_traceback_of_rays_own_is_no_output() -> None:
    trace = record("Full traceback: Traceback (most recent call last):", "ERR")
    found = out(begins("10.0.0.2", "check"), trace, "  File x", "ValueError: y", record("!!!"), "z", ends("10.0.0.2"))
    failure = found.nodes["10.0.0.2"].failure
    assert failure is not None
    assert failure.output == ("z",)


def test_a_command_of_several_lines_is_read_whole_and_is_no_output() -> None:
    running = record("Running `ulimit -n 65536\necho 'it is'`")
    whole = begins("10.0.0.2", "ulimit -n 65536\necho '\"'\"'it is'\"'\"'")
    failure = out(running, whole, "told", ends("10.0.0.2")).nodes["10.0.0.2"].failure
    assert failure == Failure("Setup commands", "ulimit -n 65536\necho 'it is'", ("told",))


def test_a_command_that_is_announced_in_several_lines_is_no_output_of_another_node() -> None:
    announced = record("(1/3) export RAY_HEAD_IP=10.0.0.1; first\nsecond\nthird")
    found = out(begins("10.0.0.2", "check"), announced, record("Running `first`"), "x", ends("10.0.0.2"))
    assert found.nodes["10.0.0.2"].failure == Failure("Setup commands", "check", ("x",))


def test_a_long_log_of_one_open_record_is_read_quickly() -> None:
    started = time.process_time()
    opened = record("Full command is `ssh -o ConnectTimeout=1s me@10.0.0.2 'x", "VVINFO")
    out(opened, *["a line of output"] * 50_000)
    assert time.process_time() - started < 5  # with time that grows with the square of the lines it is a minute


def test_records_that_share_a_line_are_told_apart() -> None:
    found = out(begins("10.0.0.2", "check") + record("Success."), "x", "y" + ends("10.0.0.2"))
    assert found.nodes["10.0.0.2"].failure == Failure("Setup commands", "check", ("x", "y"))


def test_a_command_that_ssh_was_given_in_another_form_is_told_as_it_is() -> None:
    odd = record("Full command is `ssh -o ConnectTimeout=10s me@10.0.0.2 docker exec 'x`", "VVINFO")
    bare = record("Full command is `ssh -o ConnectTimeout=10s me@10.0.0.3 ls -l`", "VVINFO")
    found = out(odd, bare, ends("10.0.0.2"), ends("10.0.0.3")).nodes
    assert [node.failure.command for node in found.values() if node.failure] == ["docker exec 'x", "ls -l"]


def test_the_variables_that_ray_sets_are_no_part_of_a_command() -> None:
    command = "export RAY_HEAD_IP=10.0.0.1; export RAY_NODE_TYPE_NAME=; export MINE=1; check"
    failure = out(begins("10.0.0.2", command), ends("10.0.0.2")).nodes["10.0.0.2"].failure
    assert failure is not None
    assert failure.command == "export MINE=1; check"


def test_an_instance_of_a_cloud_is_known_by_the_address_that_was_fetched_for_it() -> None:
    found = out(
        record("Fetched IP: 10.0.0.2"),
        record("NodeUpdater: i-0abc: Got IP  [LogTimer=0ms]"),
        begins("10.0.0.2", "check"),
        "x",
        ends("i-0abc"),
    )
    assert found.addresses == {"i-0abc": "10.0.0.2"}
    assert found.nodes["i-0abc"].failure == Failure("Setup commands", "check", ("x",))


def test_an_address_that_is_known_wins_and_one_that_may_be_anothers_is_not_taken() -> None:
    got = [record(f"NodeUpdater: {node}: Got IP ") for node in ("worker", "10.0.0.3", "i-b")]
    fetched = record("Fetched IP: 10.0.0.9")
    found = out(fetched, got[0], fetched, got[1], got[2], addresses={"worker": "10.0.0.2"})
    assert found.addresses == {"worker": "10.0.0.2"}


# monitor.log


def test_the_newer_autoscaler_begins_anew_with_a_new_round() -> None:
    failed = (
        "Ray installation failed on instance 10.0.0.2: Ray installation failed with unexpected status: update-failed"
    )
    spawned = "Creating new (spawn_updater) updater thread for node 10.0.0.2."
    installing = "Update instance ALLOCATED->RAY_INSTALLING (id=a, type=t, cloud_instance_id=10.0.0.2, ray_id=): x"
    one_round = [installing, *[spawned, failed] * ATTEMPTS]
    assert not log(*one_round[:-1]).nodes["10.0.0.2"].is_given_up
    assert log(*one_round).nodes["10.0.0.2"].is_given_up
    anew = log(*one_round, installing, spawned, failed).nodes["10.0.0.2"]
    assert (anew.num_failed, anew.is_given_up) == (1, False)


@pytest.mark.parametrize(
    "line",
    [
        "Update instance RAY_INSTALLING->RAY_INSTALL_FAILED (id=a, type=t, cloud_instance_id=fe80::2, ray_id=): failed",
        "StandardAutoscaler: Terminating the node with id fe80::2 and ip fe80::2. (launch failed)",
    ],
)
def test_a_node_that_is_given_up_is_found_in_both_autoscalers_words(line: str) -> None:
    assert log(line).nodes["fe80::2"].is_given_up


@pytest.mark.parametrize("why", ["idle", "outdated", "max_workers reached"])
def test_a_node_that_ends_for_another_reason_is_not_given_up(why: str) -> None:
    line = f"StandardAutoscaler: Terminating the node with id i-a and ip 10.0.0.2. ({why})"
    assert log(line).nodes == {}


def test_what_a_cloud_does_not_launch_is_told_once_in_its_words() -> None:
    older = "NodeLauncher0: Failed to launch 2 node(s) of type gpu. (InsufficientCapacity): none left"
    newer = "Update instance REQUESTED->ALLOCATION_FAILED (id=a, type=gpu, cloud_instance_id=, ray_id=): launch failed"
    assert log(older, newer, older).not_launched == [older.removeprefix("NodeLauncher0: "), "launch failed"]


# monitor.err


def test_what_ssh_says_of_an_address_is_noted_for_its_node_and_the_rest_is_kept() -> None:
    found = read_monitor(
        "",
        "",
        "ssh: connect to host 10.0.0.2 port 22: Connection refused\nme@10.0.0.3: Permission denied (publickey).\n"
        "Shared connection to 10.0.0.2 closed.\nbash: no such thing\n",
        {"worker": "10.0.0.2"},
    )
    said = {node: known.ssh for node, known in found.nodes.items()}
    assert said == {"worker": "Connection refused", "10.0.0.3": "Permission denied (publickey)."}
    assert found.errors == ["bash: no such thing"]


@pytest.mark.parametrize(("name", "is_one"), [("10.0.0.1", True), ("fe80::1", True), ("i-0abc", False), ("", False)])
def test_an_address_is_told_from_a_name(name: str, is_one: bool) -> None:
    assert is_address(name) is is_one
