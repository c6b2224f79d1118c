# SPDX-License-Identifier: MIT OR Apache-2.0
"""deploy/compose.yaml: checked against the Compose Specification's schema, and against what its commands take."""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from metrale_ray.cli_parser import make_parser
from metrale_ray.config import KNOWN_VARIABLES
from metrale_ray.serve.deployment import MARGIN_S, build_app
from metrale_ray.serve.options import ModelOptions, ServiceOptions, model_options, service_options, split_options
from tests.deploying.compose import MissingVariable, load, variables_of
from tests.deploying.dockerfile import instructions

TOP = Path(__file__).parents[2]
COMPOSE = TOP / "deploy" / "compose.yaml"
SCHEMA = json.loads((TOP / "tests" / "fixtures" / "compose" / "compose-spec.json").read_text())
REQUIRED = {"MODEL_DIR": "/models/m"}
FILE = load(COMPOSE, REQUIRED)
SERVICES = FILE["services"]
ON_RAY = ("head", "worker", "application")
RAY_VARIABLES = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_DASHBOARD_ADDRESS"}


def mistakes(value: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(value)]


def seconds(text: str) -> float:
    (number,) = re.findall(r"^(\d+)s$", text)
    return float(number)


def of_service(argv: list[str]) -> tuple[ModelOptions, ServiceOptions]:
    """What `metrale-ray serve` makes of its command line, but for the contents of the file of keys."""
    given = vars(make_parser().parse_args(argv))
    given["model"] = given.pop("model_path")
    assert given.pop("command") == "serve"
    given.pop("api_key_file")
    for_model, for_service = split_options(given)
    return model_options(for_model), service_options(for_service, {})


def application() -> dict[str, Any]:
    """The configuration that is deployed on the cluster."""
    read: dict[str, Any] = yaml.safe_load(FILE["configs"]["application"]["content"])
    return read


def test_the_schema_finds_no_mistake() -> None:
    assert mistakes(FILE) == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("services", "serve", "helthcheck"), {}),
        (("services", "serve", "ports"), "8000"),
        (("services", "worker", "depends_on", "head", "condition"), "healthy"),
        (("secrets", "api_key", "environmnt"), "X"),
    ],
)
def test_the_schema_finds_a_planted_mistake(place: tuple[str, ...], value: Any) -> None:
    planted = copy.deepcopy(FILE)
    target = planted
    for name in place[:-1]:
        target = target[name]
    target[place[-1]] = value
    assert mistakes(planted)


def test_a_model_has_to_be_named() -> None:
    with pytest.raises(MissingVariable, match="set MODEL_DIR to the folder of a checkpoint"):
        load(COMPOSE, {})


def test_each_variable_is_explained_at_the_top() -> None:
    top = COMPOSE.read_text().partition("\nname:")[0]
    of_secrets = {secret["environment"] for secret in FILE["secrets"].values()}
    for name in variables_of(COMPOSE) | of_secrets:
        assert re.search(rf"^#   {name}\s+\S", top, re.MULTILINE), name


def test_the_variables_that_are_set_count() -> None:
    values = {"EP_SIZE": "3", "CPUS_PER_RANK": "4", "MODEL_NAME": "m: #1", "SERVE_HOST": "0.0.0.0", "SERVE_PORT": "81"}
    changed = load(COMPOSE, {**REQUIRED, **values})
    model, _ = of_service(changed["services"]["serve"]["command"])
    assert (model.config.ep_size, model.config.num_cpus_per_rank, model.names) == (3, 4.0, ("m: #1",))
    assert changed["services"]["worker"]["deploy"]["replicas"] == "3"
    arguments = yaml.safe_load(changed["configs"]["application"]["content"])["applications"][0]["args"]
    assert (arguments["ep_size"], arguments["num_cpus_per_rank"], arguments["served_model_name"]) == (3, 4, "m: #1")
    (port,) = changed["services"]["head"]["ports"]
    assert (port["host_ip"], port["published"]) == ("0.0.0.0", "81")


@pytest.mark.parametrize("name", list(SERVICES))
def test_a_container_has_no_more_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "user", "network_mode", "pid", "ipc"} & set(service)
    for volume in service["volumes"]:
        assert volume["read_only"] is True
        assert volume["bind"] == {"create_host_path": False}


@pytest.mark.parametrize("name", list(SERVICES))
def test_a_port_is_published_to_this_machine_alone(name: str) -> None:
    published = [(port["host_ip"], port["target"]) for port in SERVICES[name].get("ports", [])]
    assert published == ([("127.0.0.1", 8000)] if name in ("serve", "head") else [])


@pytest.mark.parametrize("name", list(SERVICES))
def test_no_key_is_in_a_command_or_a_variable(name: str) -> None:
    service = SERVICES[name]
    variables = service.get("environment", {})
    assert set(variables) <= {*KNOWN_VARIABLES, *RAY_VARIABLES}
    files = [*variables.values(), *service["command"], FILE["configs"]["application"]["content"]]
    used = {match for text in files for match in re.findall(r"/run/secrets/(\w+)", text)}
    assert used & set(service["secrets"]) == set(service["secrets"]) <= set(FILE["secrets"])
    assert {"METRALE_API_KEY", "RAY_AUTH_TOKEN"} == {secret["environment"] for secret in FILE["secrets"].values()}
    assert not {"METRALE_API_KEY", "RAY_AUTH_TOKEN"} & (set(variables) | variables_of(COMPOSE))


@pytest.mark.parametrize("name", list(SERVICES))
def test_a_container_starts_again_and_says_how_it_is(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][:2] == ["CMD", "wget"]
    assert "--no-proxy" in service["healthcheck"]["test"]


def test_dependencies_are_waited_for_until_they_are_healthy() -> None:
    assert SERVICES["worker"]["depends_on"] == {"head": {"condition": "service_healthy"}}
    assert [each["condition"] for each in SERVICES["application"]["depends_on"].values()] == ["service_healthy"] * 2


def test_the_service_alone_is_reached_with_a_key_and_probed_without() -> None:
    service = SERVICES["serve"]
    model, options = of_service(service["command"])
    assert (options.host, options.port) == ("0.0.0.0", service["ports"][0]["target"])
    assert "--api-key-file=/run/secrets/api_key" in service["command"]
    assert service["healthcheck"]["test"][-1] == f"http://127.0.0.1:{options.port}{options.open_paths[0]}"
    assert model.config.model == service["volumes"][0]["target"]
    assert model.config.ep_size == 2


def test_the_service_alone_has_time_to_start_and_to_drain() -> None:
    service = SERVICES["serve"]
    model, options = of_service(service["command"])
    assert seconds(service["stop_grace_period"]) > options.drain_timeout_s + MARGIN_S
    assert seconds(service["healthcheck"]["start_period"]) > model.config.start_timeout_s


def test_the_image_s_entrypoint_takes_the_command_of_serve_and_ray_s_do_without() -> None:
    assert "entrypoint" not in SERVICES["serve"]
    image = next(
        each for each in instructions((TOP / "deploy" / "Dockerfile").read_text()) if each.name == "ENTRYPOINT"
    )
    for name in ON_RAY:
        assert SERVICES[name]["entrypoint"] == image.words[:2]


def test_the_application_is_one_that_ray_serve_takes() -> None:
    config = ServeDeploySchema.model_validate(application())
    (app,) = config.applications
    assert app.import_path == "metrale_ray.serve.deployment:build_app"
    build_app(app.args)


def test_the_application_is_what_the_service_alone_is() -> None:
    config = application()
    arguments = config["applications"][0]["args"]
    model, options = of_service(SERVICES["serve"]["command"])
    placed = ("placement", "api_key_file", "drain_timeout_s")
    for_model, for_service = split_options({name: value for name, value in arguments.items() if name not in placed})
    assert model_options({**for_model}) == model
    assert service_options(for_service, {}).open_paths == options.open_paths
    assert arguments["api_key_file"] == "/run/secrets/api_key"


def test_the_application_is_reached_where_the_port_is_published() -> None:
    config = application()
    assert config["http_options"]["host"] == "0.0.0.0"
    assert config["http_options"]["port"] == SERVICES["head"]["ports"][0]["target"]
    assert config["proxy_location"] == "HeadOnly"
    check = SERVICES["application"]["healthcheck"]["test"][-1]
    assert check == f"http://head:{config['http_options']['port']}{config['applications'][0]['args']['open_path']}"


def test_the_cluster_has_room_for_one_rank_in_each_worker() -> None:
    arguments = application()["applications"][0]["args"]
    assert int(SERVICES["worker"]["deploy"]["replicas"]) == arguments["ep_size"]
    assert arguments["placement"] == "STRICT_SPREAD"
    assert f"--num-cpus={arguments['num_cpus_per_rank']}" in SERVICES["worker"]["command"]
    assert "--num-cpus=0" in SERVICES["head"]["command"], "or a rank could be placed beside the proxy"


def test_the_application_is_taken_down_before_the_cluster_with_time_to_drain() -> None:
    arguments = application()["applications"][0]["args"]
    assert set(SERVICES["application"]["depends_on"]) == {"head", "worker"}  # what depends is stopped first
    assert seconds(SERVICES["application"]["stop_grace_period"]) > arguments["drain_timeout_s"] + 4 * MARGIN_S


def test_the_application_is_taken_down_by_a_configuration_without_it() -> None:
    script = SERVICES["application"]["command"][-1]
    (sed,) = re.findall(r"sed '[^']*'", script)
    text = FILE["configs"]["application"]["content"]
    kept = subprocess.run(shlex.split(sed), input=text, text=True, capture_output=True, check=True).stdout
    (none,) = re.findall(r"echo '(applications: [^']*)'", script)
    config = ServeDeploySchema.model_validate(yaml.safe_load(kept + none))
    assert config.applications == []
    assert config.http_options == ServeDeploySchema.model_validate(application()).http_options


def test_the_script_that_deploys_has_no_mistake_that_a_linter_finds(tmp_path: Path) -> None:
    script = tmp_path / "deploy.sh"
    script.write_text("#!/bin/bash\n" + SERVICES["application"]["command"][-1])
    linter = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([linter, script], text=True, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_nodes_meet_at_the_head_with_the_token() -> None:
    (port,) = [word for word in SERVICES["head"]["command"] if word.startswith("--port=")]
    assert f"--address=head:{port.partition('=')[2]}" in SERVICES["worker"]["command"]
    for name in ON_RAY:
        assert SERVICES[name]["environment"]["RAY_AUTH_MODE"] == "token"
        assert SERVICES[name]["environment"]["RAY_AUTH_TOKEN_PATH"] == "/run/secrets/ray_token"


def test_the_build_takes_packages_from_where_the_variables_say() -> None:
    indexes = {"TORCH_INDEX": "https://a.b/c", "PIP_INDEX_URL": "https://d.e/f"}
    for variables, arguments in ((indexes, indexes), ({}, dict.fromkeys(indexes, ""))):
        build = load(COMPOSE, {**REQUIRED, **variables})["services"]["serve"]["build"]
        assert build["args"] == arguments
    known = [
        each.rest.partition("=")[0]
        for each in instructions((TOP / build["dockerfile"]).read_text())
        if each.name == "ARG"
    ]
    assert set(build["args"]) <= set(known)
