# SPDX-License-Identifier: MIT OR Apache-2.0
"""The error tree: stable codes, exit codes, and fields that survive pickling."""

from __future__ import annotations

import copy
import pickle

import pytest

from metrale_ray import errors
from metrale_ray.errors import EpCommandFailed, FrameError, LinkLost, MetraleError, RequestError, SlotPoisoned


def family(kind: type[MetraleError]) -> list[type[MetraleError]]:
    """`kind` and all that is derived from it."""
    return [kind, *(each for child in kind.__subclasses__() for each in family(child))]


KINDS = [kind for kind in family(MetraleError) if kind.__module__ == errors.__name__]
FIELDS: dict[str, dict[str, object]] = {
    "StartError": {"rank": 2},
    "RequestError": {"code": "too_long", "param": "prompt"},
    "FrameError": {"num_bytes": 17, "rank": 3},
    "CommandRefused": {"slots": (1, 2)},
    "EpCommandFailed": {"rank": 2, "slots": (0, 5), "cmd": "decode_batch"},
    "SlotPoisoned": {"slots": (4,)},
    "LinkLost": {"rank": 1},
    "Desync": {"rank": 1, "seq": 99, "field": "tokens"},
    "EngineDead": {"rank": 0},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_survives_pickling_with_all_its_fields(kind: type[MetraleError], protocol: int) -> None:
    fields = FIELDS.get(kind.__name__, {})
    before = kind("what went wrong", **fields)
    after = pickle.loads(pickle.dumps(before, protocol))
    assert type(after) is kind
    assert (after.message, after.code, str(after)) == ("what went wrong", before.code, str(before))
    assert {name: getattr(after, name) for name in fields} == fields


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_can_be_copied(kind: type[MetraleError]) -> None:
    before = kind("m", **FIELDS.get(kind.__name__, {}))
    after = copy.copy(before)
    assert (type(after), str(after), after.fields) == (kind, str(before), before.fields)


def test_every_error_with_fields_of_its_own_is_in_the_table_above() -> None:
    own = {kind.__name__ for kind in KINDS if "__init__" in vars(kind)} - {"MetraleError"}
    assert own == set(FIELDS)


def test_fields_are_absent_when_they_are_not_known() -> None:
    error = EpCommandFailed("m")
    assert (error.rank, error.slots, error.cmd) == (None, None, None)
    assert LinkLost("m").rank is None


def test_codes_are_unique_and_are_words_with_underscores() -> None:
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    assert all(code.replace("_", "").isalpha() and code.islower() for code in codes)


def test_codes_are_stable() -> None:
    assert {kind.__name__: kind.code for kind in KINDS} == {
        "MetraleError": "error",
        "UserError": "user_error",
        "ConfigError": "config_error",
        "RequestError": "invalid_request",
        "JournalError": "journal_error",
        "StartError": "start_error",
        "PlacementError": "placement_error",
        "HandshakeError": "handshake_error",
        "CheckpointError": "checkpoint_error",
        "ProtocolError": "protocol_error",
        "FrameError": "frame_error",
        "SessionError": "session_error",
        "CommandRefused": "command_refused",
        "EpCommandFailed": "command_failed",
        "PeerFailed": "peer_failed",
        "MemoryDamaged": "memory_damaged",
        "SlotPoisoned": "slot_poisoned",
        "LinkLost": "link_lost",
        "Desync": "desync",
        "EngineDead": "engine_dead",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_exit_codes_tell_the_users_mistake_a_failed_start_and_a_dead_engine_apart(kind: type[MetraleError]) -> None:
    expected = 1
    for base, code in ((errors.UserError, 2), (errors.StartError, 3), (errors.EngineDead, 4)):
        expected = code if issubclass(kind, base) else expected
    assert kind.exit_code == expected


def test_the_drawing_at_the_top_of_the_file_names_every_error() -> None:
    drawing = errors.__doc__ or ""
    assert [kind.__name__ for kind in KINDS if f" {kind.__name__}" not in drawing] == []


def test_a_refusal_carries_a_code_of_its_own_and_leaves_that_of_the_class() -> None:
    assert RequestError("m", code="queue_full").code == "queue_full"
    assert RequestError("m").code == RequestError.code == "invalid_request"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "bad frame: too short"),
        ({"num_bytes": 0}, "bad frame (0 bytes): too short"),
        ({"rank": 0}, "bad frame from rank 0: too short"),
        ({"num_bytes": 5, "rank": 3}, "bad frame from rank 3 (5 bytes): too short"),
    ],
)
def test_a_frame_error_names_the_rank_and_the_number_of_bytes(fields: dict[str, int], text: str) -> None:
    assert str(FrameError("too short", **fields)) == text


# EpCommandFailed.find


def raised(
    error: BaseException, cause: BaseException | None = None, during: BaseException | None = None
) -> BaseException:
    error.__cause__, error.__context__ = cause, during
    return error


def test_find_gives_the_error_itself() -> None:
    error = EpCommandFailed("m")
    assert EpCommandFailed.find(error) is error


def test_find_gives_nothing_where_there_is_nothing() -> None:
    assert EpCommandFailed.find(None) is None
    assert (
        EpCommandFailed.find(raised(ValueError("a"), cause=KeyError("b"), during=SlotPoisoned("c", slots=(1,)))) is None
    )


def test_find_goes_through_what_an_error_was_raised_from() -> None:
    error = EpCommandFailed("m")
    assert EpCommandFailed.find(raised(RuntimeError(), cause=raised(ValueError(), cause=error))) is error


def test_find_goes_through_what_an_error_was_raised_during_also_when_it_is_hidden() -> None:
    error = EpCommandFailed("m")
    outer = raised(RuntimeError(), during=error)
    outer.__suppress_context__ = True
    assert EpCommandFailed.find(raised(ValueError(), cause=outer)) is error


def test_find_ends_in_a_chain_that_bites_its_tail() -> None:
    first, second = RuntimeError("1"), RuntimeError("2")
    raised(first, cause=second, during=first)
    raised(second, during=first)
    assert EpCommandFailed.find(first) is None
    second.__cause__ = error = EpCommandFailed("m")
    error.__cause__ = first
    assert EpCommandFailed.find(first) is error


def test_find_gives_the_nearest_of_several() -> None:
    near, far = EpCommandFailed("near"), EpCommandFailed("far")
    assert EpCommandFailed.find(raised(RuntimeError(), cause=raised(ValueError(), cause=far), during=near)) is near


class WrappedByRay(RuntimeError):
    """As Ray does: the worker's exception is kept in `cause`."""

    def __init__(self, cause: object) -> None:
        super().__init__("task failed")
        self.cause = cause


def test_find_goes_through_the_wrapping_of_ray_and_keeps_tag_and_message() -> None:
    error = EpCommandFailed("out of rows", rank=1, slots=(3,), cmd="decode")
    found = EpCommandFailed.find(pickle.loads(pickle.dumps(WrappedByRay(error))))
    assert found is not None
    assert (found.message, found.rank, found.slots, found.cmd) == ("out of rows", 1, (3,), "decode")


def test_find_passes_over_a_cause_that_is_no_exception() -> None:
    assert EpCommandFailed.find(WrappedByRay("a text")) is None
