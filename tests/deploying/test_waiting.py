# SPDX-License-Identifier: MIT OR Apache-2.0
"""Who has joined a cluster, who has not, and why."""

from __future__ import annotations

from typing import Any

import pytest

from metrale_ray.deploying.expected import ExpectedNodes
from metrale_ray.deploying.monitor_log import Failure, MonitorLog, NodeLog
from metrale_ray.deploying.waiting import MAX_TEXT, STATES, Outlook, Sight, outlook

HEAD, SECOND, THIRD = "10.0.0.1", "10.0.0.2", "10.0.0.3"
EXPECTED = ExpectedNodes((HEAD, SECOND, THIRD), 3, "own")
SETUP = Failure("Setup commands", "check --venv /opt/venv", ("no python", "set --venv"))


def monitor(node: NodeLog | None = None, **others: Any) -> MonitorLog:
    return MonitorLog({} if node is None else {THIRD: node}, **others)


def seen(*alive: str, **others: Any) -> Outlook:
    return outlook(EXPECTED, Sight(frozenset(alive), **others))


def reason(**others: Any) -> str:
    found = seen(HEAD, SECOND, **others)
    assert [name for name, _ in found.missing] == [THIRD]
    return found.missing[0][1]


def test_when_all_are_there_nothing_is_missing_whatever_the_logs_say() -> None:
    given_up = NodeLog(3, True, SETUP)
    found = seen(HEAD, SECOND, THIRD, "10.0.0.99", monitor=monitor(given_up), autoscaler_error="it died")
    assert (found.is_complete, found.is_over) == (True, False)
    assert found.summary() == "3 of 3 nodes have joined"
    assert found.joined == EXPECTED.names


def test_those_who_wait_are_told_who_is_missing() -> None:
    assert seen(HEAD).summary() == f"1 of 3 nodes have joined; waiting for {SECOND}, {THIRD}"


@pytest.mark.parametrize("state", STATES)
def test_each_state_of_a_node_on_its_way_is_told_in_words(state: str) -> None:
    assert reason(states={THIRD: state}) == STATES[state]


@pytest.mark.parametrize("states", [{}, {THIRD: "up-to-date"}])
def test_a_node_that_joined_and_died_is_told_as_that(states: dict[str, str]) -> None:
    told = reason(states=states, gone={THIRD: "health check failed."})
    assert told == "it joined and has gone: health check failed; see raylet.out among Ray's logs on it"
    assert reason(states={THIRD: "setting-up"}, gone={THIRD: ""}) == STATES["setting-up"]  # it comes again


def test_a_machine_that_joined_by_another_address_can_be_found() -> None:
    known = {name: name for name in EXPECTED.names}
    told = outlook(EXPECTED, Sight(frozenset({HEAD, SECOND, "192.168.0.3"}), {THIRD: "up-to-date"}, addresses=known))
    assert told.missing[0][1].endswith("at other addresses, and one may be this: 192.168.0.3")


def test_a_name_that_nobody_knows_is_told_as_that() -> None:
    sight = Sight(frozenset({HEAD}), addresses={"nod3": "nod3"})
    assert outlook(ExpectedNodes(("nod3",), 1), sight).missing[0][1].startswith("nobody knows a machine of this name")


def test_what_a_terminal_would_obey_is_left_out() -> None:
    wild = Failure("Setup commands", "a\x1b]0;b", ("\x1b[2Jno\x07 disk",))
    assert reason(monitor=monitor(NodeLog(1, True, wild))) == "Setup commands (`a]0;b`) failed: [2Jno disk"


def test_a_state_that_nobody_knows_is_told_as_it_is() -> None:
    assert reason(states={THIRD: "strange"}) == "its state is strange"


def test_a_node_of_which_nothing_is_known_is_told_as_that() -> None:
    assert "has not begun with it" in reason()


def test_a_command_that_failed_is_told_with_its_output_before_any_state() -> None:
    told = reason(states={THIRD: "setting-up"}, monitor=monitor(NodeLog(2, False, SETUP)))
    assert told == "Setup commands (`check --venv /opt/venv`) failed 2 times: no python | set --venv"
    assert not seen(HEAD, SECOND, monitor=monitor(NodeLog(2, False, SETUP))).is_over


def test_output_that_may_be_another_nodes_is_told_as_that() -> None:
    shared = Failure("Setup commands", None, ("no python",), is_shared=True)
    told = "Setup commands failed: no python (or from commands of other nodes)"
    assert reason(monitor=monitor(NodeLog(1, True, shared))) == told


def test_without_output_the_errors_of_all_nodes_are_told() -> None:
    silent = Failure("Ray start commands", "ray start", ())
    told = reason(monitor=monitor(NodeLog(1, True, silent), errors=["old"] * 9 + ["Version mismatch"]))
    assert told.endswith("failed: old | old | old | old | old | Version mismatch (or from commands of other nodes)")
    assert reason(monitor=monitor(NodeLog(1, True, silent))) == "Ray start commands (`ray start`) failed"


def test_what_ssh_says_is_the_reason_while_a_node_is_not_reached() -> None:
    log = monitor(NodeLog(ssh="Permission denied (publickey)."))
    assert reason(states={THIRD: "waiting-for-ssh"}, monitor=log) == (
        "ssh does not reach it: Permission denied (publickey)"
    )
    assert reason(states={THIRD: "setting-up"}, monitor=log) == STATES["setting-up"]  # it was reached since
    given_up = monitor(NodeLog(1, True, ssh="Connection refused"))
    assert reason(states={THIRD: "uninitialized"}, monitor=given_up).endswith("Connection refused; it was given up")


def test_a_node_that_was_given_up_ends_the_wait_and_the_others_are_told_too() -> None:
    found = seen(HEAD, states={SECOND: "setting-up"}, monitor=monitor(NodeLog(3, True, SETUP)))
    assert found.is_over
    assert found.failure(60).splitlines() == [
        "1 of 3 nodes have joined, and no more will come",
        f"{SECOND}: its setup commands run",
        f"{THIRD}: Setup commands (`check --venv /opt/venv`) failed 3 times: no python | set --venv",
        "such a node is not tried again by itself: mend it, then `ray down FILE` and `ray up FILE`",
    ]
    assert "given it up" in reason(monitor=monitor(NodeLog(1, True)))


def test_the_time_that_has_passed_is_told_where_it_was_the_end() -> None:
    assert seen(HEAD, SECOND).failure(60).splitlines()[0] == "2 of 3 nodes have joined, and 60 s have passed"


def test_an_autoscaler_that_has_ended_ends_the_wait_with_its_error() -> None:
    error = "The autoscaler failed with the following error:\nTraceback\nValueError: no such field\n"
    found = seen(HEAD, SECOND, autoscaler_error=error)
    assert found.is_over
    assert found.missing[0][1] == "the autoscaler has ended: ValueError: no such field"
    assert reason(autoscaler_error="") == "the autoscaler has ended: no reason given"


def test_a_machine_is_found_by_its_address_under_the_name_that_the_user_gave() -> None:
    expected = ExpectedNodes(("head", "other"), 2)
    sight = Sight(frozenset({HEAD}), {SECOND: "setting-up"}, addresses={"head": HEAD, "other": SECOND})
    found = outlook(expected, sight)
    assert (found.joined, found.missing) == (("head",), (("other", STATES["setting-up"]),))


def test_a_command_of_several_lines_is_told_in_one() -> None:
    script = Failure("Ray start commands", "ulimit -n 65536\nray start \\\n  --block", ())
    told = "Ray start commands (`ulimit -n 65536 ray start \\ --block`) failed"
    assert reason(monitor=monitor(NodeLog(1, True, script))) == told


def test_long_texts_are_cut() -> None:
    long = Failure("Setup commands", "x" * 5000, ("y" * 5000,))
    assert len(reason(monitor=monitor(NodeLog(1, True, long)))) < 3 * MAX_TEXT


# Nodes of a cloud, which have no names before they are there


def by_number(*alive: str, **others: Any) -> Outlook:
    return outlook(ExpectedNodes((), 3, "far"), Sight(frozenset(alive), **others))


def test_nodes_without_names_are_counted() -> None:
    assert by_number(HEAD, SECOND, THIRD, "10.0.0.4").is_complete
    found = by_number(HEAD)
    assert found.summary() == "1 of 3 nodes have joined; waiting for 2 nodes"
    assert not found.is_over


def test_instances_that_are_known_are_named_and_one_that_failed_may_be_replaced() -> None:
    log = MonitorLog({"i-a": NodeLog(3, True, SETUP), "i-b": NodeLog()}, {"i-a": SECOND, "i-b": HEAD})
    found = by_number(HEAD, monitor=log, states={THIRD: "setting-up"})
    assert [name for name, _ in found.missing] == [THIRD, "i-a"]
    assert not found.is_over
    assert found.count() == "1 of 3 nodes have joined"


def test_instances_that_a_cloud_does_not_give_are_told_with_its_reason() -> None:
    found = by_number(HEAD, SECOND, monitor=MonitorLog(not_launched=["old", "launch failed with no capacity"]))
    assert found.missing == (("1 node", "launch failed with no capacity"),)
    assert by_number(HEAD, autoscaler_error="Boom").is_over
