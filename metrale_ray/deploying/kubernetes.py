# SPDX-License-Identifier: MIT OR Apache-2.0
"""Manifests for KubeRay: a RayService that serves one model, or a RayCluster for jobs and batches.

Rules. The head pod holds no rank and offers Ray no CPU; each pod of ranks offers exactly its ranks' CPUs and GPUs, so
that the ranks have one place each. Pods ask for what they may use (requests are limits). A key is never in a manifest:
it comes from a Secret that stands there by name. What the manifests need of KubeRay is in version 1.5.1 and later.

What it leaves out: the volume with the model, Secrets, an Ingress, and the image (`deploy/Dockerfile`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from metrale_ray.deploying.templates import render
from metrale_ray.errors import ConfigError

Kind = Literal["rayservice", "raycluster"]

MODEL_FOLDER = "/models"
DATA_FOLDER = "/data"
KEYS_FOLDER = "/etc/metrale/keys"
POD_RESOURCE = "metrale_pod"
"""Ray's name for a pod of ranks: each has one, of which the front of the service takes most and the engine the rest."""
FRONT_SHARE = 0.9
ENGINE_SHARE = 0.1

SERVING_CPUS = 2
"""Cores of a pod of ranks beside its ranks': for Ray, Ray Serve's proxy and the front."""
HEAD_CPUS = 2
HEAD_MEMORY = "8Gi"
HEAD_SHM = "1Gi"

POD_TIMEOUT_S = 1800
"""How long the engine waits for pods of ranks: nodes may have to be added, and images to be pulled."""
LOAD_TIMEOUT_S = 1800
RAY_STOP_S = 20
GRACE_MARGIN_S = 40
"""Above the drain, before a pod is killed: the end of the engine (15 s), then that of Ray."""
STALLED_CHECKS = 60
STALLED_PERIOD_S = 10

MAX_NAME_CHARACTERS = {"rayservice": 47, "raycluster": 53}  # KubeRay's own limits, for the names it makes of it
UNITS = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
MIN_SHM_BYTES = 256 * 2**20
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._:/@-]{0,254}")
UPGRADES = ("NewCluster", "None")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """What a manifest can be told; the flags have these names with dashes. Raises ConfigError.

    `model`: the checkpoint's folder in the pods, below /models, where the claim `model_claim` is mounted. `ranks` are
    spread over pods of `ranks_per_pod`. `memory` and `shm`: each pod of ranks, shm being a part of its memory, as
    Kubernetes writes sizes (64Gi). `data_claim`: a writable claim on the head at /data, for files of jobs (RayCluster).
    `keys_secret`: the Secret with the service's keys, NAME-keys where none is given. `upgrade`: NewCluster brings a
    changed cluster up beside the old one, None leaves it to whoever deletes the old one. Times in seconds.
    """

    name: str = "metrale"
    namespace: str = "default"
    model: str = f"{MODEL_FOLDER}/model"
    served_model_name: str | None = None
    gpu: bool = False
    ranks: int = 2
    ranks_per_pod: int = 1
    cpus_per_rank: int = 8
    memory: str = "64Gi"
    shm: str = "2Gi"
    image: str | None = None
    ray_version: str = "2.60.0"
    model_claim: str = "models"
    data_claim: str | None = None
    keys_secret: str | None = None
    drain_timeout_s: int = 30
    upgrade: str = "NewCluster"

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_pod", "cpus_per_rank"):
            _check_count(name, getattr(self, name), 1)
        _check_count("drain_timeout_s", self.drain_timeout_s, 0)
        if not isinstance(self.gpu, bool):
            raise ConfigError(f"--gpu is {self.gpu!r}; it must be true or false")
        if self.ranks % self.ranks_per_pod:
            raise ConfigError(
                f"--ranks is {self.ranks} and --ranks-per-pod {self.ranks_per_pod}; every pod holds equally many, "
                "so make the first a multiple of the second"
            )
        self._check_names()
        self._check_texts()
        self._check_sizes()

    @property
    def pods(self) -> int:
        """Pods of ranks."""
        return self.ranks // self.ranks_per_pod

    @property
    def placement(self) -> str:
        """The ranks' placement on the pods, by Ray's name."""
        if self.pods == 1:
            return "STRICT_PACK"
        return "STRICT_SPREAD" if self.ranks_per_pod == 1 else "PACK"

    @property
    def chosen_image(self) -> str:
        """The image, with that of `deploy/Dockerfile` where none was given."""
        return self.image or ("metrale-ray:0.1.0-gpu" if self.gpu else "metrale-ray:0.1.0")

    @property
    def chosen_keys_secret(self) -> str:
        """The name of the Secret with the keys."""
        return self.keys_secret or f"{self.name}-keys"

    @property
    def public_name(self) -> str:
        """What clients call the model."""
        return PurePosixPath(self.model).name if self.served_model_name is None else self.served_model_name

    def _check_names(self) -> None:
        if not isinstance(self.name, str) or not DNS_LABEL.fullmatch(self.name):
            raise ConfigError(
                f"--name is {self.name!r}; it must be small letters, digits and dashes, begin with a letter, and end "
                "with a letter or digit"
            )
        if not isinstance(self.namespace, str) or not re.fullmatch(
            r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", self.namespace
        ):
            raise ConfigError(
                f"--namespace is {self.namespace!r}; it must be up to 63 small letters, digits and dashes"
            )
        for name in ("model_claim", "data_claim", "keys_secret"):
            value = getattr(self, name)
            is_optional = name != "model_claim"
            if (value is None and is_optional) or _is_object_name(value):
                continue
            raise ConfigError(
                f"{_flag(name)} is {value!r}; it must be an object's name in Kubernetes, such as my-models"
            )

    def _check_texts(self) -> None:
        for name in ("model", "served_model_name"):
            value = getattr(self, name)
            if value is None and name == "served_model_name":
                continue
            if not isinstance(value, str) or not value or len(value) > 256 or not value.isprintable():
                raise ConfigError(f"{_flag(name)} is {value!r}; it must be a text of 1 to 256 printable characters")
        path = PurePosixPath(self.model)
        if PurePosixPath(MODEL_FOLDER) not in path.parents or ".." in path.parts:
            raise ConfigError(
                f"--model is {self.model!r}; it must be the checkpoint's folder in the pods, below {MODEL_FOLDER}, "
                f"where the claim {self.model_claim!r} is mounted: {MODEL_FOLDER}/NAME"
            )
        if self.image is not None and (not isinstance(self.image, str) or not IMAGE.fullmatch(self.image)):
            raise ConfigError(
                f"--image is {self.image!r}; it must be an image's name, such as registry.example/metrale-ray:1"
            )
        if not isinstance(self.ray_version, str) or not re.fullmatch(r"\d+\.\d+\.\d+", self.ray_version):
            raise ConfigError(f"the version of Ray is {self.ray_version!r}; it must be the image's, such as 2.60.0")
        if self.upgrade not in UPGRADES:
            raise ConfigError(f"--upgrade is {self.upgrade!r}; allowed are {', '.join(UPGRADES)}")

    def _check_sizes(self) -> None:
        memory, shm = size_bytes("memory", self.memory), size_bytes("shm", self.shm)
        if shm < MIN_SHM_BYTES:
            raise ConfigError(f"--shm is {self.shm!r}; Ray's own objects need at least 256Mi")
        if 2 * shm > memory:
            raise ConfigError(
                f"--shm is {self.shm!r} and --memory {self.memory!r}; shared memory is taken from the pod's memory and "
                "may be half of it: lower --shm, or raise --memory"
            )


def size_bytes(name: str, value: object) -> int:
    """The bytes of a size as Kubernetes writes it. Raises ConfigError that names it."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})(Mi|Gi|Ti)", value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f"{_flag(name)} is {value!r}; it must be a whole number with Mi, Gi or Ti, such as 64Gi")
    return int(match[1]) * UNITS[match[2]]


def render_rayservice(options: KubernetesOptions) -> str:
    """The manifest of a service, and of who may reach its pods. Raises ConfigError."""
    if options.data_claim is not None:
        raise ConfigError(f"--data-claim is {options.data_claim!r}; a service writes no files: leave it out")
    return _render("rayservice", options)


def render_raycluster(options: KubernetesOptions) -> str:
    """The manifest of a cluster for jobs, and of who may reach its pods. Raises ConfigError."""
    return _render("raycluster", options)


def _render(kind: Kind, options: KubernetesOptions) -> str:
    limit = MAX_NAME_CHARACTERS[kind]
    if len(options.name) > limit:
        raise ConfigError(f"--name is {options.name!r}; KubeRay takes up to {limit} characters for a {kind}")
    return render(f"{kind}.yaml", _values(kind, options))


def _values(kind: Kind, options: KubernetesOptions) -> dict[str, object]:
    is_service = kind == "rayservice"
    rank_cpus = options.ranks_per_pod * options.cpus_per_rank
    cpus = rank_cpus + SERVING_CPUS
    return {
        "options": options,
        "is_service": is_service,
        "model_folder": MODEL_FOLDER,
        "data_folder": DATA_FOLDER,
        "keys_folder": KEYS_FOLDER,
        "pod_resource": POD_RESOURCE,
        "front_share": FRONT_SHARE,
        "engine_share": ENGINE_SHARE,
        "head": {"cpus": HEAD_CPUS, "memory": HEAD_MEMORY, "shm": HEAD_SHM, "object_bytes": _object_bytes(HEAD_SHM)},
        "pod": {
            "cpus": cpus,
            "ray_cpus": rank_cpus if is_service else cpus,
            "object_bytes": _object_bytes(options.shm),
        },
        "pod_timeout_s": POD_TIMEOUT_S,
        "load_timeout_s": LOAD_TIMEOUT_S,
        "ray_stop_s": RAY_STOP_S,
        "grace_s": GRACE_MARGIN_S + (options.drain_timeout_s if is_service else 0),
        "stalled_checks": STALLED_CHECKS,
        "stalled_period_s": STALLED_PERIOD_S,
    }


def _object_bytes(shm: str) -> int:
    """Ray's object store: half of /dev/shm. The other half is torch's and NCCL's."""
    return size_bytes("shm", shm) // 2


def _check_count(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(f"{_flag(name)} is {value!r}; it must be a whole number of at least {least}")


def _is_object_name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 253 and DNS_SUBDOMAIN.fullmatch(value) is not None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
