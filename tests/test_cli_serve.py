# SPDX-License-Identifier: MIT OR Apache-2.0
"""The flags of `metrale-ray serve`: each option has one, and mistakes are told before anything starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from metrale_ray import cli
from metrale_ray.cli_flags import ENGINE_FLAGS
from metrale_ray.cli_serve import LIMIT_FLAGS, MODEL_FLAGS, SERVICE_FLAGS
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.options import LIMIT_NAMES, MODEL_NAMES, SERVICE_NAMES


def test_every_option_has_a_flag_of_its_name_and_each_flag_an_option() -> None:
    assert [flag.setting for flag in LIMIT_FLAGS] == list(LIMIT_NAMES)
    assert [flag.setting for flag in MODEL_FLAGS] == list(MODEL_NAMES)
    assert [flag.setting for flag in SERVICE_FLAGS] == list(SERVICE_NAMES)


def test_the_kind_of_a_limits_flag_is_that_of_its_default() -> None:
    defaults = dataclasses.asdict(ServeLimits())
    assert [flag.kind for flag in LIMIT_FLAGS] == [type(defaults[flag.setting]) for flag in LIMIT_FLAGS]


def test_the_help_shows_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for flag in (*LIMIT_FLAGS, *MODEL_FLAGS, *SERVICE_FLAGS, *ENGINE_FLAGS):
        assert flag.names[0] in text
    assert "seconds until a request that is not done has failed (default: 3600.0)" in text
    for variable in ("METRALE_API_KEY", "METRALE_ADMIN_KEY"):
        assert f"a list of processes shows it to everybody on this machine; also {variable} (default: none)" in text
    assert text.count("file with one such key in each line; no list of processes shows it") == 2
    assert "port to listen on; 0 for any free one (default: 8000)" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no model given"),
        (["m", "--model", "m"], "the model is given twice"),
        (["m", "--max-n", "65"], "max_n is 65; the engine allows at most 64"),
        (["m", "--port", "70000"], "port is 70000"),
        (["m", "--api-key", "short"], "key 1 of 1 in api_key has 5 characters"),
        (["m", "--tool-parser", "gemma"], "tool_parser is 'gemma'"),
        (["m", "--ep-size", "0"], "ep_size is 0"),
        (["m", "--chat-template", "nowhere.jinja"], "chat_template is 'nowhere.jinja', which is no file"),
    ],
)
def test_a_mistake_in_the_flags_is_one_line_and_nothing_starts(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("METRALE_API_KEY", raising=False)
    assert cli.main(["serve", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_a_file_holds_engine_settings_and_options_side_by_side_and_flags_win(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: m\nep-size: 2\nmax-n: 3\nport: 99999\n")
    assert cli.main(["serve", "--config", str(file)]) == 2
    assert "port is 99999" in capsys.readouterr().err
    assert cli.main(["serve", "--config", str(file), "--port", "0", "--max-n", "0"]) == 2
    assert "max_n is 0" in capsys.readouterr().err
    file.write_text("model: m\nmax-nn: 3\n")
    assert cli.main(["serve", "--config", str(file)]) == 2
    assert "unknown option 'max_nn'; did you mean 'max_n'" in capsys.readouterr().err
