# SPDX-License-Identifier: MIT OR Apache-2.0
"""Configurations for `ray up`: one's own machines, Amazon's cloud and Google's.

Rules. The token of Ray's authentication is a file of the launching machine that Ray's launcher copies to each node; it
is in no command, no log and no YAML. Every node is there from the beginning, and none is added or removed later: ranks
do not move. What is written is the same for the same options.

What it leaves out: what runs on a node before Ray (`node_setup`), and Kubernetes (`kubernetes`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from metrale_ray.deploying import values
from metrale_ray.deploying.node_setup import NODE_FOLDER, TOKEN_PATH, NodeSetup, Step
from metrale_ray.deploying.ports import DASHBOARD_PORT, GCS_PORT, NODE_PORTS, RAY_CLIENT_PORT
from metrale_ray.deploying.templates import render
from metrale_ray.errors import UserError

MAX_NODES = 256
MAX_RANKS_PER_NODE = 16
MIN_DISK_GB, MAX_DISK_GB = 50, 16000
DASHBOARD_HOSTS = ("127.0.0.1", "0.0.0.0")
BOOTSTRAP_PATH = "~/ray_bootstrap_config.yaml"  # where Ray's launcher puts the cluster's configuration
HEAD_GONE_S = 20  # so long a worker waits for a head that does not answer
JOIN_S = 120  # so long a machine may take to join
OBJECT_STORE_BYTES = 10**9  # no token passes through Ray's store, which else takes 30 % of the memory
RUNS_ALREADY = (
    "Ray runs already and is left as it is: machines that are new in this file join, "
    "and any other change needs `ray down` first."
)
HEADS_HERE = '"$(pgrep -a -u "$(id -u)" -x gcs_server)"'  # each Ray has one of these, on its head
ANOTHER_RAY = (
    'echo "error: another Ray of user $(id -un) runs on $(hostname), and this one would stop it; '
    'end it first, with \\`ray stop\\`" >&2; exit 1'
)
# The autoscaler that runs reads the configuration again, but which machines there are from a file that Ray's provider
# writes only when it is made.
NOTE_MACHINES = (
    """python -c 'import os, yaml; from ray.autoscaler._private.local.node_provider import LocalNodeProvider; """
    f"""config = yaml.safe_load(open(os.path.expanduser("{BOOTSTRAP_PATH}"))); """
    """LocalNodeProvider(config["provider"], config["cluster_name"])'"""
)
UBUNTU_PACKAGES = ("python3-venv",)
GCP_CPU_IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
GCP_GPU_IMAGE = (
    "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accelerator-2404-amd64-with-nvidia-580"
)
# 32 cores with AMX and 128 GiB; one L40S with 48 GB. GCP: 22 cores with AMX and 88 GB; one L4 with 24 GB.
AWS_TYPES = {False: "m7i.8xlarge", True: "g6e.4xlarge"}
GCP_TYPES = {False: "c3-standard-22", True: "g2-standard-16"}


@dataclass(frozen=True, kw_only=True)
class RayUpOptions:
    """What all of them have. `ep_size` ranks, `ranks_per_node` on each node; `token_file` on the launching machine."""

    setup: NodeSetup
    name: str = "metrale-ray"
    ssh_user: str = "ubuntu"
    ssh_key: str | None = None
    token_file: str = TOKEN_PATH
    dashboard_host: str = DASHBOARD_HOSTS[0]
    ep_size: int = 2
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        values.cluster_name(self.name, "--name")
        values.ssh_user(self.ssh_user, "--ssh-user")
        if self.ssh_key is not None:
            values.path(self.ssh_key, "--ssh-key")
        values.path(self.token_file, "--token-file")
        if self.dashboard_host not in DASHBOARD_HOSTS:
            raise values.wrong(self.dashboard_host, "--dashboard-host", " or ".join(DASHBOARD_HOSTS))
        values.count(self.ranks_per_node, "--ranks-per-node", most=MAX_RANKS_PER_NODE)
        values.count(self.ep_size, "--ep-size", most=MAX_NODES * self.ranks_per_node)

    @property
    def num_nodes(self) -> int:
        """Nodes that hold the ranks, the head among them."""
        return math.ceil(self.ep_size / self.ranks_per_node)

    @property
    def head_address(self) -> str | None:
        """The head's address, where it is known before the cluster is there."""
        return None


@dataclass(frozen=True, kw_only=True)
class OnPremiseOptions(RayUpOptions):
    """One's own machines: the head's address, and the addresses or names of the others."""

    head_ip: str
    worker_ips: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        values.address(self.head_ip, "--head-ip")
        for worker in self.worker_ips:
            values.host(worker, "--worker-ips")
        hosts = [self.head_ip, *self.worker_ips]
        for host in hosts:
            if hosts.count(host) > 1:
                raise UserError(f"{host} is given twice; --head-ip and --worker-ips name each machine once")
        if self.num_nodes > len(hosts):
            raise UserError(
                f"--ep-size {self.ep_size} needs {self.num_nodes} machines with {self.ranks_per_node} rank(s) on each, "
                f"and --head-ip and --worker-ips name {len(hosts)}; name more, or give a larger --ranks-per-node"
            )

    @property
    def head_address(self) -> str:
        return self.head_ip


@dataclass(frozen=True, kw_only=True)
class AwsOptions(RayUpOptions):
    """Amazon's cloud. `image` is of `region`; `ssh_key` and `key_name` are the two halves of one pair, or absent."""

    image: str
    region: str = "us-west-2"
    zone: str | None = None
    instance_type: str | None = None
    key_name: str | None = None
    security_group: str | None = None
    disk_gb: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        values.aws_image(self.image, "--image")
        values.cloud_name(self.region, "--region")
        if self.zone is not None:
            values.cloud_name(self.zone, "--zone")
            if not self.zone.startswith(self.region):
                raise UserError(f"--zone {self.zone} is not in --region {self.region}; give one of that region")
        if self.instance_type is not None:
            values.instance_type(self.instance_type, "--instance-type")
        if self.security_group is not None:
            values.aws_security_group(self.security_group, "--security-group")
        if self.key_name is not None:
            values.key_name(self.key_name, "--key-name")
        if (self.key_name is None) != (self.ssh_key is None):
            raise UserError("--key-name and --ssh-key belong together; without both, Ray makes a pair of keys")
        _check_disk(self.disk_gb)


@dataclass(frozen=True, kw_only=True)
class GcpOptions(RayUpOptions):
    """Google's cloud."""

    project: str
    region: str = "us-central1"
    zone: str | None = None
    instance_type: str | None = None
    image: str | None = None
    disk_gb: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        values.project(self.project, "--project")
        values.cloud_name(self.region, "--region")
        if self.zone is not None:
            values.cloud_name(self.zone, "--zone")
            if not self.zone.startswith(f"{self.region}-"):
                raise UserError(f"--zone {self.zone} is not in --region {self.region}; give one of that region")
        if self.instance_type is not None:
            values.instance_type(self.instance_type, "--instance-type")
        if self.image is not None:
            values.gcp_image(self.image, "--image")
        _check_disk(self.disk_gb)


def render_on_premise(options: OnPremiseOptions) -> str:
    """The YAML for one's own machines. Ray's schema for them has no types of nodes."""
    return render("ray-up-local.yaml", {"provider": "local", **_common(options), "options": options})


def render_aws(options: AwsOptions) -> str:
    """The YAML for Amazon's cloud."""
    chosen = {
        "zone": options.zone or f"{options.region}a",
        "instance_type": options.instance_type or AWS_TYPES[options.setup.gpu],
        "head_setup": Step("What Ray's autoscaler on the head needs.", options.setup.pip("boto3>=1.34")),
    }
    return render("ray-up-aws.yaml", {"provider": "aws", **_common(options), **chosen, "options": options})


def render_gcp(options: GcpOptions) -> str:
    """The YAML for Google's cloud."""
    packages = ("google-api-python-client>=2", "google-auth-httplib2>=0.2", "cryptography")
    chosen = {
        "zone": options.zone or f"{options.region}-a",
        "instance_type": options.instance_type or GCP_TYPES[options.setup.gpu],
        "image": options.image or (GCP_GPU_IMAGE if options.setup.gpu else GCP_CPU_IMAGE),
        "head_setup": Step("What Ray's autoscaler on the head needs.", options.setup.pip(*packages)),
    }
    return render("ray-up-gcp.yaml", {"provider": "gcp", **_common(options), **chosen, "options": options})


def _common(options: RayUpOptions) -> dict[str, object]:
    return {
        "file_mounts": {TOKEN_PATH: options.token_file, **options.setup.files},
        "steps": options.setup.steps(),
        "head_start": _head_start(options),
        "worker_start": _own_worker_start(options) if isinstance(options, OnPremiseOptions) else _worker_start(options),
        "num_workers": options.num_nodes - 1,
        "head_gone_s": HEAD_GONE_S,
    }


def _head_start(options: RayUpOptions) -> str:
    """Starts Ray on the head, unless it runs there: `ray up` runs this each time, and would restart it."""
    address = options.head_address
    flags = ["--head", *([f"--node-ip-address={address}"] if address else []), f"--port={GCS_PORT}"]
    flags += [f"--dashboard-host={options.dashboard_host}", f"--dashboard-port={DASHBOARD_PORT}"]
    flags += [f"--ray-client-server-port={RAY_CLIENT_PORT}", "--disable-usage-stats"]
    flags += [f"--autoscaling-config={BOOTSTRAP_PATH}", *_node_flags()]
    is_own = isinstance(options, OnPremiseOptions)
    lines = [
        *_environment(options),
        *(["export RAY_enable_autoscaler_v2=0"] if is_own else []),
        f"case {HEADS_HERE} in",
        f"*--gcs_server_port={GCS_PORT}*)",
        f"  echo '{RUNS_ALREADY}'",
        *([f"  {NOTE_MACHINES}"] if is_own else []),
        "  ;;",
        '"")',
        "  ray stop",
        *(f"  {line}" for line in _wrapped("ray start", flags)),
        "  ;;",
        f"*) {ANOTHER_RAY};;",
        "esac",
    ]
    return "\n".join(lines)


def _worker_start(options: RayUpOptions) -> str:
    """Starts Ray on a worker of a cloud, whose machine ends with the cluster."""
    flags = ['--address="$RAY_HEAD_IP":' + str(GCS_PORT), *_node_flags()]
    return "\n".join([*_environment(options), "ray stop", *_wrapped("ray start", flags)])


def _own_worker_start(options: OnPremiseOptions) -> str:
    """Starts Ray on one's own machine, with somebody who cleans up when the head has gone: `ray down` does not.

    The lock keeps two such apart, as the last act of the first would end the Ray of the second. A home may be shared,
    so the files have the machine's name.
    """
    # The head's address is written down: Ray's own guess of it needs a route to the internet.
    flags = ["--block", f"--address={options.head_ip}:{GCS_PORT}", *_node_flags()]
    lines = [
        *_environment(options),
        f"export RAY_gcs_rpc_server_reconnect_timeout_s={HEAD_GONE_S}",
        f"[ -z {HEADS_HERE} ] || {{ {ANOTHER_RAY}; }}",
        "ray stop",
        f'mkdir -p {NODE_FOLDER}; own={NODE_FOLDER}/ray_start-"$(hostname)"; rm -f "$own".log',
        """setsid flock "$own".lock bash -c '""",
        *(f"  {line}" for line in _wrapped("ray start", flags)),
        """  echo "ray start ended with code $?"; ray stop --force""",
        """' > "$own".log 2>&1 < /dev/null &""",
        f"for _ in $(seq {JOIN_S}); do",
        """  grep -qs "Ray runtime started" "$own".log && exit 0""",
        """  grep -qs "ray start ended" "$own".log && break""",
        "  sleep 1",
        "done",
        f'cat "$own".log; echo "error: Ray did not start here, or not in {JOIN_S} s" >&2; exit 1',
    ]
    return "\n".join(lines)


# Ray's launcher sets OMP_NUM_THREADS and PYTHONWARNINGS for its commands; they are not meant for the ranks.
def _environment(options: RayUpOptions) -> list[str]:
    return [
        f"{options.setup.path_command} RAY_AUTH_MODE=token",
        "unset OMP_NUM_THREADS PYTHONWARNINGS",
        'ulimit -n 65536 2> /dev/null || ulimit -n "$(ulimit -Hn)"',
    ]


def _node_flags() -> list[str]:
    ports = [f"--{name}={port}" for name, port in NODE_PORTS.items()]
    return [*ports, f"--object-store-memory={OBJECT_STORE_BYTES}"]


def _wrapped(program: str, flags: list[str]) -> list[str]:
    """A command over several lines, three flags on each."""
    rows = [" ".join(flags[start : start + 3]) for start in range(0, len(flags), 3)]
    lines = [f"{program} {rows[0]}", *(f"  {row}" for row in rows[1:])]
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def _check_disk(size_gb: int) -> None:
    if not MIN_DISK_GB <= size_gb <= MAX_DISK_GB:
        raise UserError(f"--disk-gb is {size_gb}; give a size from {MIN_DISK_GB} to {MAX_DISK_GB}")
