# SPDX-License-Identifier: MIT OR Apache-2.0
"""deploy/serve.yaml: what Ray Serve takes, with arguments that the application takes, as it stands and on GPUs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from ray.serve.schema import HTTPOptionsSchema, LoggingConfig, ServeApplicationSchema, ServeDeploySchema

from metrale_ray.errors import ConfigError
from metrale_ray.serve.deployment import build_app
from metrale_ray.serve.options import model_options, service_options, split_options

FILE = Path(__file__).parents[2] / "deploy" / "serve.yaml"
IMPORT_PATH = "metrale_ray.serve.deployment:build_app"
OPTION = re.compile(r"^(\s+)# (\w+: \S+)$", re.MULTILINE)


def config(text: str | None = None) -> dict[str, Any]:
    """The file's, or another text's."""
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text() if text is None else text)
    return loaded


def with_all_options(text: str) -> str:
    """The text with each option that it shows as a comment."""
    return OPTION.sub(r"\1\2", text)


def args(loaded: dict[str, Any]) -> dict[str, Any]:
    (application,) = loaded["applications"]
    found: dict[str, Any] = application["args"]
    return found


def test_ray_serve_takes_it() -> None:
    schema = ServeDeploySchema.model_validate(config())
    assert [application.import_path for application in schema.applications] == [IMPORT_PATH]
    ServeDeploySchema.model_validate(config(with_all_options(FILE.read_text())))


def unknown_fields(loaded: dict[str, Any]) -> list[str]:
    """Names that Ray Serve would ignore without a word."""
    kinds: tuple[tuple[type[BaseModel], dict[str, Any]], ...] = (
        (ServeDeploySchema, loaded),
        (HTTPOptionsSchema, loaded["http_options"]),
        (LoggingConfig, loaded["logging_config"]),
        *((ServeApplicationSchema, application) for application in loaded["applications"]),
    )
    return [name for kind, given in kinds for name in given if name not in kind.model_fields]


def test_every_field_is_one_of_ray_serves_own() -> None:
    assert unknown_fields(config()) == []


@pytest.mark.parametrize("name", ["proxy_location", "request_timeout_s", "encoding", "import_path"])
def test_a_misspelt_field_is_found(name: str) -> None:
    assert unknown_fields(config(FILE.read_text().replace(f"{name}:", f"{name}x:"))) == [f"{name}x"]


def test_the_application_takes_its_arguments() -> None:
    assert build_app(args(config())) is not None
    with pytest.raises(ConfigError, match="unknown option 'ep_sise'; did you mean 'ep_size'"):
        build_app({**args(config()), "ep_sise": 2})


def test_every_option_that_is_shown_as_a_comment_is_one() -> None:
    loaded = args(config(with_all_options(FILE.read_text().replace("num_cpus_per_rank: 8\n", "num_cpus_per_rank\n"))))
    shown = {"num_gpus_per_rank", "device", "num_cpus_per_rank", "api_key_file", "tool_parser", "reasoning_parser"}
    assert shown <= set(loaded)
    model, service = split_options({name: value for name, value in loaded.items() if name != "num_fronts"})
    options = model_options(model)
    assert (options.config.device, options.config.num_gpus_per_rank, options.tool_parser) == ("cuda", 1, "hermes")
    assert service["api_key_file"] == "/etc/metrale/keys"


def test_without_a_key_nobody_else_reaches_it() -> None:
    assert config()["http_options"]["host"] == "127.0.0.1"
    assert "api_key_file" not in args(config())


def test_a_request_that_takes_too_long_is_answered_before_ray_serve_cuts_it() -> None:
    given = args(config())
    _, service = split_options(given)
    limits = service_options(service, {}).limits
    assert config()["http_options"]["request_timeout_s"] > limits.max_request_s


def test_probes_of_whoever_has_no_key_are_open() -> None:
    assert args(config())["open_path"] == ["/health/ready", "/health/progress"]
