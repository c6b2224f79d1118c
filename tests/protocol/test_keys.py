# SPDX-License-Identifier: MIT OR Apache-2.0
"""Key pairs keep their secret, and a text that is no key is refused."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import pprint
from collections.abc import Callable
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.errors import StartError
from metrale_ray.protocol.front.client import FrontClient
from metrale_ray.protocol.keys import KEY_CHARACTERS, KeyPair, new_keys, raw_key
from metrale_ray.protocol.zmq_transport import ZmqTransport
from tests.protocol.front_rig import running

NO_KEYS = ["", "short", "x" * 39, "x" * 41, "é" * 40, '"' * 40, "#" * 40]


def test_each_pair_is_new_and_its_public_half_belongs_to_its_secret() -> None:
    pairs = [new_keys() for _ in range(20)]
    assert len({pair.public for pair in pairs} | {pair.secret for pair in pairs}) == 40
    for pair in pairs:
        assert zmq.curve_public(pair.secret.encode()).decode() == pair.public
        assert len(raw_key(pair.public)) == 32


def test_no_text_of_a_pair_shows_its_secret() -> None:
    pair = new_keys()
    assert pair.public in repr(pair)
    assert pair.secret not in repr(pair) + str(pair) + f"{pair}" + repr([pair]) + pprint.pformat(pair)


@pytest.mark.parametrize("list_fields", [dataclasses.asdict, dataclasses.astuple, dataclasses.fields, vars])
def test_nothing_lists_what_a_pair_holds(list_fields: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError):
        list_fields(new_keys())


def test_what_holds_a_pair_cannot_be_taken_apart_either() -> None:
    @dataclasses.dataclass
    class Holder:
        keys: KeyPair

    with pytest.raises(TypeError, match="send its public key"):
        dataclasses.asdict(Holder(new_keys()))


@pytest.mark.parametrize("leave", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_pair_leaves_its_process_by_no_road(leave: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="send its public key"):
        leave(new_keys())


def test_a_pyzmq_without_curve_is_a_start_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    with pytest.raises(StartError, match="install pyzmq from its wheels"):
        new_keys()


@pytest.mark.parametrize("text", NO_KEYS)
def test_what_is_no_key_is_refused_wherever_a_key_is_given(text: str) -> None:
    keys = new_keys()
    refused = pytest.raises(StartError, match=f"is no public key; it must be {KEY_CHARACTERS} characters of Z85")
    with refused:
        raw_key(text)
    with refused:
        ZmqTransport.listen("127.0.0.1", "rank 1", keys, text)
    with refused:
        ZmqTransport.connect("tcp://127.0.0.1:1", "the head", keys, text)
    with refused:
        FrontClient("tcp://127.0.0.1:1", keys, text)
    with running() as rig:
        for method in (rig.server.allow, rig.server.disallow):
            with refused:
                rig.call(method, text)


@given(st.text(max_size=60))
def test_any_text_is_a_key_of_32_bytes_or_refused(text: str) -> None:
    refusal = ""
    try:
        size = len(raw_key(text))
    except StartError as error:
        size, refusal = 0, error.message
    assert size == 32 or repr(text) in refusal
