# SPDX-License-Identifier: MIT OR Apache-2.0
"""The manifests are what an API server takes, their parts fit one another, and deploy/ holds what is rendered."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from ray.serve.schema import ServeDeploySchema

from metrale_ray import cli_cluster
from metrale_ray.deploying.kubernetes import (
    RAY_STOP_S,
    KubernetesOptions,
    render_raycluster,
    render_rayservice,
    size_bytes,
)
from metrale_ray.errors import ConfigError
from metrale_ray.serve.deployment import MARGIN_S, build_app
from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.options import service_options, split_options
from tests.deploying.custom_resource import problems

TOP = Path(__file__).parents[2]
KUBERNETES = "1.37"
GPU: dict[str, Any] = {"gpu": True, "ranks": 16, "ranks_per_pod": 8, "memory": "1Ti", "shm": "64Gi"}
SHIPPED: dict[str, dict[str, Any]] = {
    "rayservice": {},
    "rayservice-gpu": GPU,
    "raycluster": {"data_claim": "data"},
    "raycluster-gpu": {**GPU, "data_claim": "data"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "rayservice one pod": {"ranks": 4, "ranks_per_pod": 4, "upgrade": "None", "keys_secret": "k", "namespace": "n"},
    "raycluster without data": {
        "ranks": 6,
        "ranks_per_pod": 3,
        "name": "x",
        "image": "registry.example:5000/a/b@sha256:0",
    },
    "rayservice no drain": {"drain_timeout_s": 0, "ranks": 8, "served_model_name": "a: b # 'c' \"{{ d }}\""},
}
ALL = {**SHIPPED, **OTHERS}
SERVICES = [name for name in ALL if name.startswith("rayservice")]


def text_of(name: str) -> str:
    render = render_rayservice if name.startswith("rayservice") else render_raycluster
    return render(KubernetesOptions(**ALL[name]))


@cache
def documents(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The custom resource and the policy."""
    resource, policy = yaml.safe_load_all(text_of(name))
    return resource, policy


def cluster_of(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = documents(name)[0]["spec"]
    return spec.get("rayClusterConfig", spec)


def groups(name: str) -> list[dict[str, Any]]:
    """The group of the head, then that of the ranks."""
    cluster = cluster_of(name)
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def pods(name: str) -> list[dict[str, Any]]:
    return [group["template"]["spec"] for group in groups(name)]


def container(pod: Mapping[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    found: dict[str, Any] = only
    return found


def serve_config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(documents(name)[0]["spec"]["serveConfigV2"])
    return config


def args_of(name: str) -> dict[str, Any]:
    (application,) = serve_config(name)["applications"]
    args: dict[str, Any] = application["args"]
    return args


def shm_bytes(pod: Mapping[str, Any]) -> int:
    (shm,) = [volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume]
    assert shm["medium"] == "Memory"
    return size_bytes("shm", shm["sizeLimit"])


# What an API server takes


@pytest.mark.parametrize("name", SHIPPED)
def test_deploy_holds_what_the_command_writes(name: str) -> None:
    renamed = {"ep_size" if setting == "ranks" else setting: value for setting, value in SHIPPED[name].items()}
    written = cli_cluster.render({"provider": "kubernetes", "kind": name.removesuffix("-gpu"), **renamed})
    assert (TOP / "deploy" / "kubernetes" / f"{name}.yaml").read_text(encoding="utf-8") == written
    assert written.endswith(text_of(name))


@pytest.mark.parametrize("name", ALL)
def test_the_custom_resource_keeps_to_kuberays_definition(name: str) -> None:
    assert problems(documents(name)[0]) == []


def without_replicas(spec: dict[str, Any]) -> dict[str, Any]:
    """What KubeRay compares to find out whether a service needs another cluster."""
    counts = ("replicas", "minReplicas", "maxReplicas")
    kept = [{name: each[name] for name in each if name not in counts} for each in spec["workerGroupSpecs"]]
    return {**spec, "workerGroupSpecs": kept}


def test_other_ranks_of_a_service_are_another_cluster_to_kuberay() -> None:
    two, four = (
        yaml.safe_load(render_rayservice(KubernetesOptions(ranks=ranks)).split("\n---\n")[0])["spec"][
            "rayClusterConfig"
        ]
        for ranks in (2, 4)
    )
    assert without_replicas(two) != without_replicas(four)
    assert without_replicas(two) == without_replicas(copy.deepcopy(two))


@pytest.mark.parametrize("name", ALL)
def test_pods_and_policy_keep_to_the_schema_of_kubernetes(name: str) -> None:
    resource, policy = documents(name)
    kubernetes_validate.validate(policy, KUBERNETES, strict=True)
    for group in groups(name):
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": resource["metadata"]}
        kubernetes_validate.validate({**template, "template": group["template"]}, KUBERNETES, strict=True)


def at(document: Any, path: str) -> Any:
    for step in path.split("."):
        document = document[int(step) if step.isdigit() else step]
    return document


HEAD = "spec.rayClusterConfig.headGroupSpec"
RANKS = "spec.rayClusterConfig.workerGroupSpecs.0"
RANK = f"{RANKS}.template.spec.containers.0"
MISTAKES = {
    "an unknown field at the top": ("spec", "serveConfig", ""),
    "a misspelt field of a group": (HEAD, "rayStartParam", {}),
    "a misspelt field of a container": (RANK, "imagePullpolicy", "Always"),
    "a misspelt field of a probe": (f"{RANK}.readinessProbe", "periodSecond", 5),
    "a number that is a text": (RANKS, "replicas", "2"),
    "a parameter that is a number": (f"{HEAD}.rayStartParams", "num-cpus", 0),
    "a number that is too great": (RANKS, "maxReplicas", 2**31),
    "a mode that there is not": ("spec.rayClusterConfig.authOptions", "mode", "tokens"),
    "a size that is none": (f"{RANK}.resources.limits", "memory", "64 GB"),
    "nothing where a list is": (RANK, "env", None),
    "a version that there is not": ("", "kind", "RayServices"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str) -> None:
    document = copy.deepcopy(documents("rayservice")[0])
    path, field, value = MISTAKES[mistake]
    (at(document, path) if path else document)[field] = value
    if mistake == "a version that there is not":
        with pytest.raises(KeyError):
            problems(document)
        return
    found = problems(document)
    assert found
    assert all(field in each for each in found), found


def test_two_ports_of_one_number_are_found() -> None:
    document = copy.deepcopy(documents("rayservice")[0])
    at(document, RANK)["ports"].append({"name": "again", "containerPort": 8000, "protocol": "TCP"})
    at(document, RANK)["ports"][0]["protocol"] = "TCP"
    assert any("is there twice" in each for each in problems(document))


def test_a_missing_field_is_found() -> None:
    document = copy.deepcopy(documents("rayservice")[0])
    del at(document, RANKS)["groupName"]
    assert any("groupName" in each for each in problems(document))


# The service's own options


@pytest.mark.parametrize("name", SERVICES)
def test_the_serve_configuration_is_one_and_names_our_deployments(name: str) -> None:
    config = serve_config(name)
    parsed = ServeDeploySchema.model_validate(config)
    assert set(config) <= set(ServeDeploySchema.model_fields)  # it ignores what it does not know
    (application,) = parsed.applications
    front = build_app(args_of(name))._bound_deployment
    engines = [engine._bound_deployment for engine in front.init_args[2]]
    assert [front.name, *(engine.name for engine in engines)] == [each.name for each in application.deployments]
    assert application.import_path == f"{build_app.__module__}:{build_app.__name__}"
    assert parsed.http_options.host == "0.0.0.0"  # another pod's requests


@pytest.mark.parametrize("name", SERVICES)
def test_the_services_options_are_taken_with_the_mounted_keys(name: str, tmp_path: Path) -> None:
    (tmp_path / "api-keys").write_text("a-key-of-clients\n")
    _, service = split_options({key: value for key, value in args_of(name).items() if key != "num_fronts"})
    mounts = {mount["name"]: mount for mount in container(pods(name)[1])["volumeMounts"]}
    folder = mounts["keys"]["mountPath"]
    assert mounts["keys"]["readOnly"]
    options = service_options({**service, "api_key_file": service["api_key_file"].replace(folder, str(tmp_path))}, {})
    assert options.api_keys == ("a-key-of-clients",)
    assert {"/health/ready", "/health/progress"} <= set(options.open_paths)


@pytest.mark.parametrize("name", SERVICES)
def test_the_model_is_where_the_claim_is_mounted_in_each_pod_of_ranks(name: str) -> None:
    pod = pods(name)[1]
    (mount,) = [mount for mount in container(pod)["volumeMounts"] if mount["name"] == "model"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "model"]
    assert args_of(name)["model"].startswith(mount["mountPath"] + "/")
    assert mount["readOnly"]
    assert volume["persistentVolumeClaim"]["readOnly"]


# Ranks and pods


@pytest.mark.parametrize("name", ALL)
def test_the_ranks_fill_what_the_pods_offer(name: str) -> None:
    options = KubernetesOptions(**ALL[name])
    head, ranks = groups(name)
    limits = container(ranks["template"]["spec"])["resources"]["limits"]
    offered = ranks["rayStartParams"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert ranks["replicas"] == ranks["minReplicas"] == ranks["maxReplicas"] == options.pods
    assert options.pods * options.ranks_per_pod == options.ranks
    assert options.ranks_per_pod * options.cpus_per_rank <= int(offered["num-cpus"]) <= int(limits["cpu"])
    if options.gpu:
        assert offered["num-gpus"] == limits["nvidia.com/gpu"] == str(options.ranks_per_pod)
    else:
        assert "nvidia.com/gpu" not in limits


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_offers_its_ranks_cpus_and_no_more(name: str) -> None:
    args, ranks = args_of(name), groups(name)[1]
    assert args["ep_size"] * args["num_cpus_per_rank"] == ranks["replicas"] * int(ranks["rayStartParams"]["num-cpus"])
    assert args.get("num_gpus_per_rank") == (1 if args["device"] == "cuda" else None)
    expected = "STRICT_PACK" if ranks["replicas"] == 1 else "PACK"
    assert args["placement"] == ("STRICT_SPREAD" if args["ep_size"] == ranks["replicas"] else expected)


@pytest.mark.parametrize("name", SERVICES)
def test_each_pod_of_ranks_has_one_front_and_room_for_the_engine(name: str) -> None:
    value = groups(name)[1]["rayStartParams"]["resources"]
    (argument,) = shlex.split(f"--resources={value}")
    resources = json.loads(argument.removeprefix("--resources="))
    assert json.loads(value.strip("'\"` ")) == resources  # as KubeRay itself reads it
    (front, engine) = [each["ray_actor_options"] for each in serve_config(name)["applications"][0]["deployments"]]
    assert front["num_cpus"] == engine["num_cpus"] == 0
    ((resource, share),) = front["resources"].items()
    assert 2 * share > resources[resource] >= share + engine["resources"][resource]
    assert args_of(name)["num_fronts"] == groups(name)[1]["replicas"]


@pytest.mark.parametrize("name", ALL)
def test_shared_memory_is_in_memory_and_holds_rays_objects(name: str) -> None:
    for group in groups(name):
        pod = group["template"]["spec"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in container(pod)["volumeMounts"]
        memory = size_bytes("memory", container(pod)["resources"]["limits"]["memory"])
        assert 75 * 2**20 < int(group["rayStartParams"]["object-store-memory"]) < shm_bytes(pod) <= memory // 2


@pytest.mark.parametrize("name", ALL)
def test_pods_ask_for_what_they_may_use_and_are_alike_where_ranks_compare(name: str) -> None:
    environments = []
    for pod in pods(name):
        resources = container(pod)["resources"]
        assert resources["requests"] == resources["limits"]
        environments.append(container(pod)["env"])
    assert "OMP_NUM_THREADS" in [variable["name"] for variable in environments[0]]
    assert environments[0] == environments[1]
    assert len({container(pod)["image"] for pod in pods(name)}) == 1


@pytest.mark.parametrize("name", ALL)
def test_a_pod_has_time_for_the_drain_and_all_that_follows(name: str) -> None:
    drain_s = args_of(name)["drain_timeout_s"] if name in SERVICES else 0
    for pod in pods(name):
        (shell, flag, command) = container(pod)["lifecycle"]["preStop"]["exec"]["command"]
        assert (shell, flag) == ("/bin/sh", "-c")
        assert command.startswith(f"sleep {drain_s}; " if name in SERVICES else "ray stop")
        assert f"ray stop --grace-period {RAY_STOP_S}" in command
        assert pod["terminationGracePeriodSeconds"] > drain_s + MARGIN_S + RAY_STOP_S


# Probes

ANSWERS = """#!/bin/sh
for last; do :; done
case "$last" in
  */api/healthz) exit $RAY ;;
  */-/healthz) exit $PROXY ;;
  */health/ready) exit $READY ;;
  */health/progress) printf %s "$BODY"; exit $PROGRESS ;;
esac
exit 99
"""
STALLED = json.dumps(ApiError(503, "work waits", code="no_progress").body())


def run_probe(pod: Mapping[str, Any], which: str, folder: Path, **answers: object) -> bool:
    """Whether a probe's command succeeds when its questions are answered so (exit codes as wget's: 0, 4, 8)."""
    fake = folder / "wget"
    fake.write_text(ANSWERS)
    fake.chmod(0o755)
    (shell, flag, command) = container(pod)[which]["exec"]["command"]
    variables = {"RAY": 0, "PROXY": 0, "READY": 0, "PROGRESS": 0, "BODY": '{"status":"ok"}', **answers}
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **{name: str(value) for name, value in variables.items()}}
    return subprocess.run([shell, flag, command], env=environment, check=False, timeout=20).returncode == 0


def test_a_pod_of_ranks_is_ready_when_ray_the_proxy_and_the_model_are(tmp_path: Path) -> None:
    rank = pods("rayservice")[1]
    assert run_probe(rank, "readinessProbe", tmp_path)
    for part in ("RAY", "PROXY", "READY"):
        assert not run_probe(rank, "readinessProbe", tmp_path, **{part: 8})


@pytest.mark.parametrize(
    ("answers", "is_live"),
    [
        ({}, True),
        ({"PROGRESS": 8, "BODY": STALLED}, False),
        ({"PROGRESS": 8, "BODY": '{"error":{"code":"not_found"}}'}, True),  # no application yet
        ({"PROGRESS": 4, "BODY": ""}, True),  # nobody listens
        ({"RAY": 8}, False),
        ({"RAY": 4}, False),
    ],
)
def test_the_head_is_restarted_for_ray_or_for_work_that_waits_in_vain(
    answers: dict[str, object], is_live: bool, tmp_path: Path
) -> None:
    assert run_probe(pods("rayservice")[0], "livenessProbe", tmp_path, **answers) is is_live


@pytest.mark.parametrize("name", ALL)
def test_kuberays_own_probes_stay_but_for_those_that_ask_more(name: str) -> None:
    head, rank = (container(pod) for pod in pods(name))
    own = {which for part in (head, rank) for which in part if which.endswith("Probe")}
    assert own == ({"livenessProbe", "readinessProbe"} if name in SERVICES else set())
    if name in SERVICES:
        assert "readinessProbe" not in head
        assert "livenessProbe" not in rank
        assert head["livenessProbe"]["periodSeconds"] * head["livenessProbe"]["failureThreshold"] >= 600  # as KubeRay's
        for probe in (head["livenessProbe"], rank["readinessProbe"]):
            waits_s = [int(wait) for wait in re.findall(r"-T (\d+)", probe["exec"]["command"][2])]
            assert sum(waits_s) < probe["timeoutSeconds"]


@pytest.mark.parametrize("name", SERVICES)
def test_the_serving_port_is_the_one_of_serve_and_has_kuberays_name(name: str) -> None:
    port = serve_config(name)["http_options"]["port"]
    for pod in pods(name):
        assert {"name": "serve", "containerPort": port} in container(pod)["ports"]


# Who may what


@pytest.mark.parametrize("name", ALL)
def test_pods_keep_to_the_restricted_standard(name: str) -> None:
    allowed = ("emptyDir", "persistentVolumeClaim", "secret")
    for pod in pods(name):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        own = container(pod)["securityContext"]
        assert own == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert all(kind in allowed for volume in pod["volumes"] for kind in set(volume) - {"name"})


@pytest.mark.parametrize("name", ALL)
def test_ray_asks_for_its_token_and_no_key_is_written(name: str) -> None:
    cluster = cluster_of(name)
    assert cluster["authOptions"] == {"mode": "token"}
    assert not {"api_key", "admin_key"} & set(args_of(name) if name in SERVICES else ())
    variables = {variable["name"] for pod in pods(name) for variable in container(pod)["env"]}
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "METRALE_API_KEY"} & variables


@pytest.mark.parametrize("name", ALL)
def test_only_the_clusters_pods_reach_all_ports(name: str) -> None:
    resource, policy = documents(name)
    spec = policy["spec"]
    assert policy["metadata"]["namespace"] == resource["metadata"]["namespace"]
    selected = spec["podSelector"]["matchLabels"]
    for group in groups(name):
        assert selected.items() <= group["template"]["metadata"]["labels"].items()
        assert "app.kubernetes.io/name" not in group["template"]["metadata"]["labels"]  # KubeRay selects by its own
    assert spec["policyTypes"] == ["Ingress"]
    everywhere = [rule for rule in spec["ingress"] if "ports" not in rule]
    assert everywhere == [{"from": [{"podSelector": {"matchLabels": selected}}]}]
    for_all = [rule["ports"] for rule in spec["ingress"] if {"podSelector": {}} in rule["from"]]
    assert for_all == ([[{"protocol": "TCP", "port": 8000}]] if name in SERVICES else [])


@pytest.mark.parametrize("name", ALL)
def test_pods_of_ranks_are_spread_by_labels_that_they_have(name: str) -> None:
    ranks = groups(name)[1]["template"]
    (spread,) = ranks["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= ranks["metadata"]["labels"].items()
    assert spread["matchLabelKeys"] == ["ray.io/cluster"]  # which KubeRay gives


# Options


def test_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    pins = (TOP / "constraints.txt").read_text().splitlines()
    assert f"ray=={KubernetesOptions().ray_version}" in pins
    assert KubernetesOptions().chosen_image == f"metrale-ray:{project['version']}"
    assert KubernetesOptions(gpu=True).chosen_image == f"metrale-ray:{project['version']}-gpu"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "--ranks is 0; it must be a whole number of at least 1"),
        ({"ranks": True}, "--ranks is True"),
        ({"ranks": 3, "ranks_per_pod": 2}, "--ranks is 3 and --ranks-per-pod 2"),
        ({"cpus_per_rank": 0.5}, "--cpus-per-rank is 0.5"),
        ({"drain_timeout_s": -1}, "--drain-timeout-s is -1"),
        ({"gpu": "yes"}, "--gpu is 'yes'"),
        ({"name": "Metrale"}, "--name is 'Metrale'"),
        ({"name": "a-"}, "--name is 'a-'"),
        ({"name": "a\n"}, "--name is 'a"),
        ({"name": "m" * 48}, "up to 47 characters for a rayservice"),
        ({"namespace": "a.b"}, "--namespace is 'a.b'"),
        ({"namespace": "n" * 64}, "namespace is"),
        ({"model_claim": None}, "--model-claim is None"),
        ({"model_claim": "my_models"}, "--model-claim is 'my_models'"),
        ({"keys_secret": ""}, "--keys-secret is ''"),
        ({"data_claim": "data"}, "a service writes no files"),
        ({"model": "/data/m"}, "below /models"),
        ({"model": "/models"}, "below /models"),
        ({"model": "/models/../etc"}, "below /models"),
        ({"model": "org/name"}, "below /models"),
        ({"model": "/models/a\nb"}, "printable"),
        ({"served_model_name": ""}, "--served-model-name is ''"),
        ({"image": "Metrale Ray"}, "--image is 'Metrale Ray'"),
        ({"ray_version": "2.60"}, "the version of Ray is '2.60'"),
        ({"upgrade": "Recreate"}, "allowed are NewCluster, None"),
        ({"memory": "64GB"}, "--memory is '64GB'; it must be a whole number with Mi, Gi or Ti"),
        ({"memory": 64}, "--memory is 64"),
        ({"shm": "128Mi"}, "at least 256Mi"),
        ({"shm": "40Gi"}, "lower --shm, or raise --memory"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        render_rayservice(KubernetesOptions(**options))


def test_a_clusters_name_may_be_longer_than_a_services() -> None:
    render_raycluster(KubernetesOptions(name="m" * 53))
    with pytest.raises(ConfigError, match="up to 53 characters for a raycluster"):
        render_raycluster(KubernetesOptions(name="m" * 54))


@given(st.text(max_size=40), st.text(max_size=40))
@example("a: b", "- {{ x }}")
@example("'\"\\", "#\u00e9\u4e2d\U0001f600 %")
def test_any_text_reads_back_as_itself_or_is_refused(folder: str, name: str) -> None:
    model = f"/models/{folder}"
    try:
        text = render_rayservice(KubernetesOptions(model=model, served_model_name=name))
    except ConfigError:
        printable = folder.isprintable() and name.isprintable() and bool(name)
        assert not printable or not Path(folder).name or ".." in Path(folder).parts
        return
    resource, _ = yaml.safe_load_all(text)
    (application,) = yaml.safe_load(resource["spec"]["serveConfigV2"])["applications"]
    assert application["args"]["model"] == model
    assert application["args"]["served_model_name"] == name
    del resource["spec"]["serveConfigV2"]
    plain = documents("rayservice")[0]
    assert resource == {**plain, "spec": {k: v for k, v in plain["spec"].items() if k != "serveConfigV2"}}
