# SPDX-License-Identifier: MIT OR Apache-2.0
"""The conformance suite against a live service, and what it says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from metrale_ray.serve.http.settings import HttpSettings
from tests.conformance import javascript
from tests.conformance.__main__ import main
from tests.conformance.checks import Check, all_checks
from tests.conformance.target import FEATURES, NotApplicable, Target
from tests.service_rig import MODEL_NAME, ServiceRig, serving, write_model

KEY = "sk-right"
TEMPLATE = Path(__file__).parent / "template.jinja"
CHECKS = all_checks()
needs_node = pytest.mark.skipif(javascript.missing() is not None, reason=str(javascript.missing()))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceRig]:
    model = write_model(tmp_path_factory.mktemp("conformance"))
    settings = HttpSettings(api_keys=(KEY,))
    with serving(model, settings=settings, tool_parser="hermes", chat_template=TEMPLATE, max_batch_size=4) as rig:
        yield rig
        rig.wait_idle()
        rig.live_probe()


@pytest.fixture(scope="module")
def target(rig: ServiceRig) -> Iterator[Target]:
    with closing(Target(rig.url, MODEL_NAME, KEY)) as target:
        yield target


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_the_python_client_finds_that(check: Check, target: Target) -> None:
    try:
        check.run(target)
    except NotApplicable as error:
        pytest.fail(f"our own model must have something to look at: {error}")


@needs_node
def test_the_javascript_client_finds_the_same(target: Target) -> None:
    found = javascript.run(target)
    assert {name: outcome for name, outcome in found.items() if outcome[0] != "ok"} == {}
    assert list(found) == javascript.names()


@needs_node
def test_both_clients_make_the_same_checks() -> None:
    python = {check.name for check in CHECKS} - javascript.ONLY_PYTHON
    assert set(javascript.names()) - javascript.ONLY_JAVASCRIPT == python


def test_every_check_has_a_name_of_its_own_and_needs_features_that_there_are() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS) > 40
    assert {need for check in CHECKS for need in check.needs} == set(FEATURES)


def test_the_command_tells_what_failed_and_leaves_out_what_it_is_told_to(
    rig: ServiceRig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONFORMANCE_KEY", KEY)
    left_out = [f"--no-{name}" for name in FEATURES if name != "models"]
    command = [rig.url, "--api-key-env", "CONFORMANCE_KEY", "--no-javascript", *left_out]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "ok      python: models are listed" in out
    assert "skipped python: token ids are a prompt (without completions, token-ids)" in out
    assert main([*command, "--model", "no-such-model"]) == 1
    out = capsys.readouterr().out
    assert "failed  python: models are listed (AssertionError" in out
    assert "failed  python: a model is found by its name (NotFoundError" in out
    assert out.endswith("2 failed\n")
