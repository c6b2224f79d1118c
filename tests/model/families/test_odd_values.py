# SPDX-License-Identifier: MIT OR Apache-2.0
"""Any JSON value at any key of a config.json gives a decoder or a refusal of one line, and quickly."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given

from metrale_ray.errors import CheckpointError
from metrale_ray.model.families import FAMILIES, family_of
from metrale_ray.model.families.config_reader import MAX_LAYERS
from metrale_ray.model.layers.rotary import Rotary
from tests.model.families.odd_values import ODD_VALUES, ROPE_TYPES, configs, places, put, valid_config

LONGEST_MESSAGE = 600
LARGEST_HEAD = 1024  # more than this is refused for the shapes of the tensors, which are not looked at here


def read_or_refuse(config: dict[str, Any]) -> str | None:
    """The refusal, None where the configuration is read; then its rotation can be computed."""
    try:
        decoder = family_of(config).read_config(config)
    except CheckpointError as error:
        refusal = error.message
    else:
        refusal = None
    if refusal is not None:
        assert "\n" not in refusal
        assert len(refusal.encode()) <= LONGEST_MESSAGE
        return refusal
    if decoder.head_dim <= LARGEST_HEAD:
        Rotary(decoder.rope, decoder.head_dim, torch.device("cpu"), torch.float32).angles(torch.arange(3))
    return None


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_odd_value_at_every_key_is_read_or_refused(architecture: str, rope_type: str) -> None:
    config = valid_config(architecture, rope_type)
    assert read_or_refuse(config) is None
    for place in places(config):
        for value in ODD_VALUES:
            read_or_refuse(put(config, place, value))


@given(configs())
def test_any_json_value_at_any_key_is_read_or_refused(config: dict[str, Any]) -> None:
    read_or_refuse(json.loads(json.dumps(config)))


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"architectures": 5}, "architectures to 5; it must be a list of texts"),
        ({"architectures": [["x"]]}, r"architectures to \[\['x'\]\]; it must be a list of texts"),
        ({"architectures": "MixtralForCausalLM"}, "architectures to 'MixtralForCausalLM'; it must be a list of texts"),
        ({"hidden_act": ["silu"]}, r"hidden_act to \['silu'\]; it must be one of"),
        ({"layer_types": 5}, "layer_types to 5; it must be a list of texts"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps to 1000.*\.\.\..*000; it must be a number from 1.2e-38 to 3.4e\+38"),
        ({"rope_theta": 10**400}, r"rope_theta to 1000.*; it must be a number from"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers to 1000000000000; it must be an integer from 1 to 10000"),
        ({"vocab_size": 2**31}, "vocab_size to 2147483648; it must be an integer from 1 to 2147483647"),
        ({"num_local_experts": 2**18}, "262144 experts in each of 2 layers are more than 262144 in all"),
    ],
)
def test_what_was_no_refusal_once_says_what_is_allowed(changes: dict[str, Any], refusal: str) -> None:
    config = {**valid_config("MixtralForCausalLM"), "rope_scaling": None, "num_experts": None, **changes}
    with pytest.raises(CheckpointError, match=refusal):
        family_of(config).read_config(config)


def test_a_type_of_rope_that_is_null_counts_as_absent() -> None:
    config = valid_config("LlamaForCausalLM")
    for rope, kind in (
        ({"rope_type": None, "type": "linear", "factor": 2.0}, "linear"),
        ({"rope_type": "yarn", "type": "linear", "factor": 2.0}, "yarn"),
        ({"rope_type": None, "type": None}, "default"),
    ):
        values = {**config, "rope_scaling": rope}
        assert family_of(values).read_config(values).rope.kind == kind


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.timeout(10)  # lists of layers were once searched for each layer
def test_the_largest_numbers_that_are_allowed_are_read_at_once(architecture: str) -> None:
    config = {**valid_config(architecture), "num_hidden_layers": MAX_LAYERS, "layer_types": None}
    if "mlp_only_layers" in config:
        config["mlp_only_layers"] = list(range(100_000))
    assert family_of(config).read_config(config).num_layers == MAX_LAYERS
