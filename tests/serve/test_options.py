# SPDX-License-Identifier: MIT OR Apache-2.0
"""A service's options: the same from flags, a file and the arguments of an application, and refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from metrale_ray.errors import ConfigError
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.options import ModelOptions, ServiceOptions, model_options, service_options, split_options


def test_flat_options_are_parted_into_the_models_and_the_services() -> None:
    model, service = split_options({"model": "m", "ep-size": 2, "served_model_name": "a", "port": 1, "max-n": 3})
    assert model == {"served_model_name": "a", "model": "m", "ep_size": 2}
    assert service == {"port": 1, "max_n": 3}


def test_an_unknown_option_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'api_keys'; did you mean 'api_key'"):
        split_options({"model": "m", "api_keys": "x"})


def test_an_option_is_given_once() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        split_options({"model": "m", "max-n": 1, "max_n": 2})


def test_a_model_is_named_by_its_folder_unless_it_has_names() -> None:
    assert model_options({"model": "some/model"}).served_names == ("some/model",)
    assert model_options({"model": "m", "served_model_name": ["a", "b"]}).served_names == ("a", "b")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tool_parser": "gemma"}, "tool_parser is 'gemma'; allowed are none, hermes"),
        ({"reasoning_parser": "x"}, "reasoning_parser is 'x'; allowed are none, think, think_open"),
        ({"served_model_name": ""}, "served_model_name is ''"),
        ({"served_model_name": 5}, "served_model_name is 5"),
        ({"chat_template": "/no/such/file"}, "which is no file"),
        ({"ep_size": 0}, "ep_size is 0"),
    ],
)
def test_a_models_options_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_options({"model": "m", **values})


def test_no_parser_may_be_asked_for() -> None:
    options = model_options({"model": "m", "tool_parser": "none", "reasoning_parser": "none"})
    assert options.tool_parser is options.reasoning_parser is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 65536}, "port is 65536"),
        ({"port": "80"}, "port is '80'"),
        ({"drain_timeout_s": -1}, "drain_timeout_s is -1; it must be a number of seconds, at least 0"),
        ({"progress_timeout_s": 0}, "progress_timeout_s is 0; it must be a number of seconds, above 0"),
        ({"progress_timeout_s": float("nan")}, "progress_timeout_s is nan"),
        ({"strict": "yes"}, "strict is 'yes'"),
        ({"max_n": 65}, "max_n is 65; the engine allows at most 64"),
        ({"max_n": True}, "max_n is True; it must be an integer above 0"),
        ({"max_body_bytes": 0}, "max_body_bytes is 0"),
        ({"max_request_s": float("inf")}, "max_request_s is inf; it must be a number of seconds above 0"),
        ({"max_m": 1}, "unknown option 'max_m'; did you mean 'max_n'"),
        ({"api_key": "short"}, "api_key has 5 characters; a key has at least 8"),
        ({"api_key": "with a space in it"}, "visible ASCII"),
        ({"api_key": "12345678", "admin_key": "12345678"}, "both an API key and an admin key"),
        ({"open_path": 1}, "open_path is 1"),
    ],
)
def test_a_services_options_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        service_options(values, {})


def test_keys_come_from_options_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# a comment\n\nkey-of-the-file\n  another-of-the-file \n")
    options = service_options(
        {"api_key": "key-of-a-flag", "api_key_file": str(file)},
        {"METRALE_API_KEY": "key-of-the-environment", "METRALE_ADMIN_KEY": "key-of-an-admin"},
    )
    assert options.api_keys == ("key-of-a-flag", "key-of-the-file", "another-of-the-file", "key-of-the-environment")
    assert options.admin_keys == ("key-of-an-admin",)


def test_keys_are_not_shown() -> None:
    assert "secret-key" not in repr(service_options({"api_key": "secret-key"}, {}))


SECRET = "12345678901"


@pytest.mark.parametrize("name", ["api_key", "admin_key"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (int(SECRET), " is of type int; it must be a text, or a list of texts; in YAML, put it in quotes"),
        ({SECRET: SECRET}, " is of type dict; it must be a text"),
        (["key-" + SECRET, int(SECRET)], "key 2 of 2 in {} is of type int; it must be a text"),
        (("key-" + SECRET, [SECRET]), "key 2 of 2 in {} is of type list; it must be a text"),
        (["key-" + SECRET, ""], "key 2 of 2 in {} has 0 characters"),
        (SECRET + " ", "{} has 12 characters; a key has at least 8, all of them visible ASCII"),
    ],
)
def test_a_mistake_in_a_key_is_told_by_its_place_and_never_shows_it(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        service_options({name: value}, {})
    assert message.format(name) in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", ["api_key", "admin_key"])
def test_a_mistake_in_a_key_of_a_file_or_the_environment_does_not_show_it(tmp_path: Path, name: str) -> None:
    file = tmp_path / "keys"
    for data, message in [
        (f"# mine\nkey-{SECRET}\n\n{SECRET} {SECRET}\n".encode(), f"the key in line 4 of {name}_file has 23 char"),
        (SECRET.encode() + b"\xff", "which is no UTF-8 text; put one key into each line"),
    ]:
        file.write_bytes(data)
        with pytest.raises(ConfigError) as caught:
            service_options({f"{name}_file": str(file)}, {})
        assert message in str(caught.value)
        assert SECRET not in str(caught.value)
    with pytest.raises(ConfigError, match=f"{name}_file is of type int; it must be the path of a file"):
        service_options({f"{name}_file": int(SECRET)}, {})
    variable = f"METRALE_{name.upper()}"
    with pytest.raises(ConfigError, match=f"the key in {variable} has 12 characters") as caught:
        service_options({}, {variable: SECRET + "\n"})
    assert SECRET not in str(caught.value)


def test_keys_that_are_no_texts_are_refused_without_showing_them() -> None:
    with pytest.raises(ConfigError, match="key 2 of api_keys is of type int") as caught:
        ServiceOptions(api_keys=("key-" + SECRET, int(SECRET)))  # type: ignore[arg-type]
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("text", ["", "# nothing\n", None])
def test_a_file_without_a_key_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match="api_key_file is"):
        service_options({"api_key_file": str(file)}, {})


def test_limits_are_options_too() -> None:
    assert service_options({"max-n": 2, "grammar-timeout-s": 1.5}, {}).limits == ServeLimits(
        max_n=2, grammar_timeout_s=1.5
    )


def test_the_defaults_listen_on_this_machine_alone_and_ask_for_no_key() -> None:
    options = ServiceOptions()
    assert (options.host, options.api_keys, options.admin_keys) == ("127.0.0.1", (), ())
    assert ModelOptions(model_options({"model": "m"}).config).served_names == ("m",)
