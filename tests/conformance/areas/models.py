# SPDX-License-Identifier: MIT OR Apache-2.0
"""The list of models."""

from __future__ import annotations

import openai
import pytest

from tests.conformance.target import Target

NEEDS = ("models",)


def models_are_listed(target: Target) -> None:
    with target.client() as client:
        models = client.models.list()
        assert models.object == "list"
        assert target.model in [model.id for model in models]
        for model in models.data:
            assert model.object == "model"
            assert isinstance(model.created, int)
            assert isinstance(model.owned_by, str)


def a_model_is_found_by_its_name(target: Target) -> None:
    with target.client() as client:
        assert client.models.retrieve(target.model).id == target.model


def a_model_that_is_not_there_is_not_found(target: Target) -> None:
    with target.client() as client, pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("no-such-model")
    assert caught.value.body is not None
