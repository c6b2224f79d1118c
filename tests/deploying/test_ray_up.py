# SPDX-License-Identifier: MIT OR Apache-2.0
"""Configurations for `ray up` hold what was asked for, and Ray's own checks take them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ray.autoscaler._private import util

from metrale_ray import cli_cluster
from metrale_ray.cli_parser import make_parser
from metrale_ray.deploying import ray_up
from metrale_ray.deploying.node_setup import NodeSetup
from metrale_ray.deploying.ray_up import AwsOptions, GcpOptions, OnPremiseOptions
from metrale_ray.errors import UserError
from tests.deploying.node_home import Home

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy" / "ray-up").glob("*.yaml"))
SETUP = NodeSetup(version="0.1.0")
IMAGE = "ami-0123456789abcdef0"


def on_premise(**options: Any) -> dict[str, Any]:
    given = {"setup": SETUP, "head_ip": "10.0.0.10", "worker_ips": ("10.0.0.11",), **options}
    return loaded(ray_up.render_on_premise(OnPremiseOptions(**given)))


def aws(**options: Any) -> dict[str, Any]:
    return loaded(ray_up.render_aws(AwsOptions(**{"setup": SETUP, "image": IMAGE, **options})))


def gcp(**options: Any) -> dict[str, Any]:
    return loaded(ray_up.render_gcp(GcpOptions(**{"setup": SETUP, "project": "my-project", **options})))


def loaded(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.load(text, Loader=yaml.CSafeLoader)
    return found


def checked_by_ray(config: dict[str, Any]) -> dict[str, Any]:
    """`config` as Ray completes it before it starts anything. Raises what Ray's own checks raise."""
    prepared: dict[str, Any] = util.prepare_config(config)
    util.validate_config(prepared)
    return prepared


def test_deploy_has_a_file_for_each_place_with_and_without_gpus() -> None:
    names = {f"{place}{kind}.yaml" for place in ("on-premise", "aws", "gcp") for kind in ("", "-gpu")}
    assert {path.name for path in FILES} == names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_in_deploy_is_what_the_command_in_its_first_line_writes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    words = shlex.split(text.partition("\n")[0].removeprefix("# "))
    assert words[:3] == ["metrale-ray", "cluster", "yaml"]
    given = vars(make_parser().parse_args(words[1:]))
    settings = {name: value for name, value in given.items() if name not in cli_cluster.NOT_REPEATED}
    assert cli_cluster.render(settings) == text, f"write it again: {shlex.join(words)} --force -o {path}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rays_own_checks_take_a_file_in_deploy(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepared = checked_by_ray(loaded(path.read_text(encoding="utf-8")))
    assert (
        prepared["max_workers"] == sum(kind["min_workers"] for kind in prepared["available_node_types"].values()) == 1
    )
    assert caplog.text == ""
    assert prepared["head_setup_commands"][: len(prepared["setup_commands"])] == prepared["setup_commands"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda config: config.update(clustername="x"),
        lambda config: config.update(max_workers="two"),
        lambda config: config["auth"].update(ssh_pirvate_key="x"),
        lambda config: config.update(setup_commands=[1]),
    ],
)
def test_rays_own_checks_find_a_mistake(spoil: Callable[[dict[str, Any]], None]) -> None:
    config = aws()
    spoil(config)
    with pytest.raises(jsonschema.ValidationError):
        checked_by_ray(config)


def test_ones_own_machines_have_no_types_of_nodes_and_are_all_there_from_the_beginning() -> None:
    config = on_premise(worker_ips=("10.0.0.11", "node-12"), ssh_key="~/.ssh/k", ssh_user="me")
    assert "available_node_types" not in config
    assert config["provider"] == {"type": "local", "head_ip": "10.0.0.10", "worker_ips": ["10.0.0.11", "node-12"]}
    assert config["auth"] == {"ssh_user": "me", "ssh_private_key": "~/.ssh/k"}
    assert checked_by_ray(config)["available_node_types"]["local.cluster.node"]["min_workers"] == 2


def test_one_machine_alone_is_a_cluster_too() -> None:
    config = checked_by_ray(on_premise(worker_ips=(), ep_size=2, ranks_per_node=2))
    assert config["provider"]["worker_ips"] == []
    assert config["max_workers"] == 0


def test_a_cloud_has_as_many_machines_as_the_ranks_need() -> None:
    for make in (aws, gcp):
        config = make(ep_size=9, ranks_per_node=4)
        assert config["max_workers"] == config["available_node_types"]["worker"]["min_workers"] == 2
        checked_by_ray(config)
        checked_by_ray(make(ep_size=1))


def test_head_and_workers_are_of_one_type_and_image() -> None:
    types = aws(instance_type="m7i.metal-24xl", security_group="sg-01234567")["available_node_types"]
    assert types["head"]["node_config"] == types["worker"]["node_config"]
    assert types["head"]["node_config"]["InstanceType"] == "m7i.metal-24xl"
    assert types["head"]["node_config"]["SecurityGroupIds"] == ["sg-01234567"]
    types = gcp(disk_gb=500)["available_node_types"]
    assert types["head"]["node_config"] == types["worker"]["node_config"]
    assert types["head"]["node_config"]["disks"][0]["initializeParams"]["diskSizeGb"] == 500


def test_gpus_change_the_types_and_the_images() -> None:
    gpu = NodeSetup(version="0.1.0", gpu=True)
    assert aws(setup=gpu)["available_node_types"]["worker"]["node_config"]["InstanceType"] == "g6e.4xlarge"
    worker = gcp(setup=gpu)["available_node_types"]["worker"]["node_config"]
    assert worker["machineType"] == "g2-standard-16"
    assert worker["scheduling"] == [{"onHostMaintenance": "TERMINATE"}]
    assert "nvidia" in worker["disks"][0]["initializeParams"]["sourceImage"]


@pytest.mark.parametrize("make", [on_premise, aws, gcp])
def test_the_token_is_a_copied_file_and_in_no_command(make: Callable[..., dict[str, Any]]) -> None:
    config = make(token_file="/secrets/token")
    assert config["file_mounts"]["~/.ray/auth_token"] == "/secrets/token"
    commands = [command for name, value in config.items() if name.endswith("_commands") for command in value]
    assert not [command for command in commands if "/secrets/token" in command or "RAY_AUTH_TOKEN=" in command]
    for name in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert all("RAY_AUTH_MODE=token" in command for command in config[name])


def test_every_command_is_sound_for_a_shell(tmp_path: Path) -> None:
    configs = [loaded(path.read_text(encoding="utf-8")) for path in FILES]
    wheel = NodeSetup("0.1.0", package="/a b/w.whl", constraints="/c", torch_index="https://a.b/c", model="~/a b")
    configs += [on_premise(setup=setup) for setup in (wheel, NodeSetup("0.1.0", package="none"))]
    commands = {each for config in configs for name in config if name.endswith("_commands") for each in config[name]}
    scripts = [tmp_path / f"{number}.sh" for number in range(len(commands))]
    for script, command in zip(scripts, sorted(commands), strict=True):
        script.write_text(f"#!/bin/bash\n{command}\n")
    check = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or "shellcheck"
    # A line for ~/.bashrc is meant to be expanded there (SC2016), and nobody knows what else is in it (SC1090).
    done = subprocess.run([check, "--exclude=SC2016,SC1090", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


TEXTS = st.text() | st.text("abcdefghij/~.-_ :'\"$%{}#&*!|>\\\n\u2028é0123456789", max_size=30)


@given(TEXTS, TEXTS, TEXTS, st.lists(TEXTS, max_size=2), TEXTS)
def test_any_text_reads_back_from_the_file_as_itself_or_is_refused(
    name: str, folder: str, user: str, workers: list[str], head: str
) -> None:
    accepted = []
    for options in (
        {"name": name},
        {"ssh_key": f"/{folder}"},
        {"ssh_user": user},
        {"worker_ips": tuple(workers)},
        {"head_ip": head},
        {"token_file": f"~/{folder}"},
    ):
        try:
            OnPremiseOptions(**{"setup": SETUP, "head_ip": "10.0.0.10", "ep_size": 1, **options})
            accepted.append(options)
        except UserError:
            continue
    options = {key: value for one in accepted for key, value in one.items()}
    if options.get("head_ip", "10.0.0.10") in options.get("worker_ips", ()):
        return  # a host that is named twice
    config = on_premise(**{"worker_ips": (), "ep_size": 1, **options})
    assert config["cluster_name"] == options.get("name", "metrale-ray")
    assert config["auth"].get("ssh_private_key") == options.get("ssh_key")
    assert config["auth"]["ssh_user"] == options.get("ssh_user", "ubuntu")
    assert config["provider"]["worker_ips"] == list(options.get("worker_ips", ()))
    assert config["provider"]["head_ip"] == options.get("head_ip", "10.0.0.10")
    assert config["file_mounts"]["~/.ray/auth_token"] == options.get("token_file", "~/.ray/auth_token")


@given(TEXTS)
def test_any_text_in_a_command_stays_one_word_of_it(text: str) -> None:
    try:
        setup = NodeSetup("0.1.0", venv=f"/{text}", package=f"p{text}")
    except UserError:
        return
    config = on_premise(setup=setup)
    words = shlex.split(config["setup_commands"][2])
    assert f"p{text}" in words
    assert f"/{text}/bin/python" in words


RUNNING = "echo 12 /x/gcs_server --log_dir=/x --gcs_server_port=6379 --other=1"
RAY_THAT_BLOCKS = """
case "$*" in
start*) touch ~/running; echo "Ray runtime started"; until [ -e ~/stopped ]; do sleep; done; rm ~/running ~/stopped;;
stop) [ ! -e ~/running ] || touch ~/stopped;;
esac
"""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.fake(
        "metrale-ray-venv/bin/ray", '[ "$1" != start ] || echo "Ray runtime started: $RAY_AUTH_MODE,$OMP_NUM_THREADS"'
    )
    home.fake("programs/pgrep", "exit 1")  # no Ray runs
    home.fake("programs/hostname", "echo node-7")
    (home.programs / "sleep").write_text("#!/bin/bash\nexec /bin/sleep 0.02\n")
    (home.programs / "sleep").chmod(0o755)
    return home


def rays_calls(home: Home) -> list[str]:
    """How Ray was called, without the flags."""
    return [" ".join(call.split()[1:3]) for call in home.calls() if call.startswith("ray ")]


@pytest.mark.parametrize("make", [on_premise, aws])
def test_a_head_where_ray_runs_is_left_alone(make: Callable[..., dict[str, Any]], home: Home) -> None:
    (command,) = make()["head_start_ray_commands"]
    done = home.run(command)
    assert done.returncode == 0
    assert rays_calls(home) == ["stop", "start --head"]
    home.fake("programs/pgrep", RUNNING)
    home.fake("metrale-ray-venv/bin/python")
    done = home.run(command)
    assert done.returncode == 0
    assert "Ray runs already and is left as it is" in done.stdout
    calls = home.calls()
    assert calls[0] == f"pgrep -a -u {os.getuid()} -x gcs_server"
    assert [call.split()[0] for call in calls[1:]] == (["python"] if make is on_premise else [])


def test_a_machine_that_is_new_is_known_to_a_head_that_runs(home: Home) -> None:
    (command,) = on_premise()["head_start_ray_commands"]
    home.fake("programs/pgrep", RUNNING)
    home.fake("metrale-ray-venv/bin/python", f'exec {sys.executable} "$@"')
    head, *workers = addresses = ["10.0.0.10", "10.0.0.11", "10.0.0.12"]
    provider = {"type": "local", "head_ip": head, "worker_ips": workers}
    config = {"cluster_name": "c", "provider": provider}
    (home.folder / "ray_bootstrap_config.yaml").write_text(yaml.safe_dump(config))
    known = {
        head: {"tags": {"ray-node-type": "head"}, "state": "running"},
        workers[0]: {"tags": {"ray-node-type": "worker"}, "state": "running"},
    }
    state = home.folder / "ray" / "cluster-c.state"
    state.parent.mkdir()
    state.write_text(json.dumps(known))
    done = home.run(f"export RAY_TMPDIR={home.folder}; {command}")
    assert done.returncode == 0, done.stderr
    found = json.loads(state.read_text())
    assert sorted(found) == addresses
    assert {address: found[address]["state"] for address in addresses} == {
        head: "running",
        workers[0]: "running",
        workers[1]: "terminated",  # which Ray's provider calls what may be started
    }


@pytest.mark.parametrize("kind", ["head", "worker"])
def test_another_ray_of_the_user_is_not_stopped(kind: str, home: Home) -> None:
    home.fake("programs/pgrep", "echo 12 /x/gcs_server --gcs_server_port=43219")
    done = home.run(on_premise()[f"{kind}_start_ray_commands"][0])
    assert done.returncode == 1
    assert "runs on node-7, and this one would stop it; end it first, with `ray stop`\n" in done.stderr
    assert rays_calls(home) == []


def test_a_head_that_does_not_start_is_a_failure(home: Home) -> None:
    home.fake("metrale-ray-venv/bin/ray", '[ "$1" != start ]')
    assert home.run(aws()["head_start_ray_commands"][0]).returncode != 0


def test_the_older_autoscaler_is_for_ones_own_machines_alone(home: Home) -> None:
    home.fake("metrale-ray-venv/bin/ray", 'echo "$1 $RAY_enable_autoscaler_v2"')
    for make, version in ((on_premise, "0"), (aws, "1"), (gcp, "1")):
        (command,) = make()["head_start_ray_commands"]
        # As Ray's launcher does.
        assert f"start {version}\n" in home.run(f"export RAY_enable_autoscaler_v2=1; {command}").stdout


def test_rays_threads_are_not_those_of_the_launchers_commands(home: Home) -> None:
    for command in (aws()["head_start_ray_commands"][0], aws()["worker_start_ray_commands"][0]):
        assert home.run(command).stdout.endswith(": token,\n")


def test_a_worker_joins_the_head_by_its_address(home: Home) -> None:
    home.run(f"export RAY_HEAD_IP=10.1.1.1; {aws()['worker_start_ray_commands'][0]}")  # as Ray's launcher does
    assert "ray start --address=10.1.1.1:6379 --node-manager-port=6380 " in home.calls()[-1]
    home.run(on_premise()["worker_start_ray_commands"][0])
    assert any("ray start --block --address=10.0.0.10:6379 --node-manager-port=6380 " in call for call in home.calls())


def test_what_is_left_on_ones_own_machine_is_ended_before_ray_starts_there_again(home: Home) -> None:
    home.fake("metrale-ray-venv/bin/ray", RAY_THAT_BLOCKS)
    (command,) = on_premise()["worker_start_ray_commands"]
    try:
        assert home.run(command).returncode == 0
        assert rays_calls(home) == ["stop", "start --block"]
        assert home.run(command).returncode == 0  # `ray stop` in it ends the first, which then cleans up
        assert rays_calls(home) == ["stop", "stop --force", "start --block"]
    finally:
        home.run("touch ~/stopped; flock ~/.metrale-ray/ray_start-node-7.lock true")
    assert rays_calls(home) == ["stop --force"]


def test_a_machine_that_cannot_join_says_why(home: Home) -> None:
    home.fake("metrale-ray-venv/bin/ray", '[ "$1" != start ] || { echo "no head at that address"; exit 3; }')
    done = home.run(on_premise()["worker_start_ray_commands"][0])
    assert done.returncode == 1
    assert "no head at that address\nray start ended with code 3\n" in done.stdout
    assert done.stderr == "error: Ray did not start here, or not in 120 s\n"


@pytest.mark.nightly  # Ray's command line takes seconds to import
@pytest.mark.parametrize("make", [on_premise, aws])
def test_ray_knows_every_flag_that_it_is_started_with(make: Callable[..., dict[str, Any]], home: Home) -> None:
    from ray.scripts.scripts import start

    known = {name for option in start.params for name in option.opts}
    config = make()
    for name in ("head_start_ray_commands", "worker_start_ray_commands"):
        home.run(config[name][0])
        (call,) = [call for call in home.calls() if call.startswith("ray start ")][:1]
        assert {word.partition("=")[0] for word in call.split()[2:]} <= known


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (on_premise, {"head_ip": "head"}, "--head-ip is 'head'; give an IPv4 address"),
        (on_premise, {"worker_ips": ("10.0.0.10",)}, "10.0.0.10 is given twice"),
        (on_premise, {"worker_ips": ("a b",)}, "--worker-ips is 'a b'"),
        (on_premise, {"ep_size": 3}, r"--ep-size 3 needs 3 machines .* name 2; name more"),
        (on_premise, {"ep_size": 0}, "--ep-size is 0"),
        (on_premise, {"ranks_per_node": 99}, "--ranks-per-node is 99; give a number from 1 to 16"),
        (on_premise, {"dashboard_host": "10.0.0.1"}, "--dashboard-host is '10.0.0.1'; give 127.0.0.1 or 0.0.0.0"),
        (on_premise, {"name": "A"}, "--name is 'A'"),
        (on_premise, {"ssh_key": "key"}, "--ssh-key is 'key'"),
        (aws, {"image": "ubuntu"}, "--image is 'ubuntu'; give an image's id, such as ami-"),
        (aws, {"zone": "us-east-1a"}, "--zone us-east-1a is not in --region us-west-2"),
        (aws, {"key_name": "k"}, "--key-name and --ssh-key belong together"),
        (aws, {"ssh_key": "/k"}, "--key-name and --ssh-key belong together"),
        (aws, {"disk_gb": 8}, "--disk-gb is 8; give a size from 50 to 16000"),
        (aws, {"security_group": "default"}, "--security-group is 'default'"),
        (gcp, {"project": "P"}, "--project is 'P'"),
        (gcp, {"zone": "us-central1"}, "--zone us-central1 is not in --region us-central1"),
        (gcp, {"image": "ubuntu"}, "--image is 'ubuntu'; give projects/"),
        (gcp, {"instance_type": "c3"}, "--instance-type is 'c3'"),
    ],
)
def test_a_wrong_option_is_refused_by_its_flag(
    make: Callable[..., dict[str, Any]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make(**options)
