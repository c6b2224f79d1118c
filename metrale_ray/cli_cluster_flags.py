# SPDX-License-Identifier: MIT OR Apache-2.0
"""The flags of `metrale-ray cluster yaml`, in tables: which there are, and which provider takes which.

What it leaves out: what the commands do, and what is asked on a terminal (`cli_cluster`).
"""

from __future__ import annotations

import argparse

from metrale_ray.cli_flags import Flag

PROVIDERS = ("local", "aws", "gcp", "kubernetes")
KINDS = ("rayservice", "raycluster")


def hosts(text: str) -> tuple[str, ...]:
    """The hosts in a text such as "10.0.0.11,10.0.0.12"."""
    names = tuple(part.strip() for part in text.split(","))
    if names == ("",):
        return ()
    if "" in names:
        raise argparse.ArgumentTypeError(f"{text!r} must be hosts with single commas between them")
    return names


def flag_of(setting: str) -> str:
    """The flag of a setting."""
    return "--" + setting.replace("_", "-")


OUTPUT_FLAGS = (
    Flag(("--output", "-o"), "where to write it (default: standard output)", metavar="FILE"),
    Flag(("--force",), "write over a file that is there", switch=True),
    Flag(("--yes", "-y"), "ask nothing: take the defaults", switch=True),
)
CLUSTER_FLAGS = (
    Flag(("--provider",), "where the cluster is to run (default: local)", metavar="|".join(PROVIDERS)),
    Flag(("--name",), "the cluster's name (default: metrale-ray; on Kubernetes metrale)", metavar="NAME"),
    Flag(("--ep-size", "--ranks"), "ranks that the experts are spread over (default: 2; local: all machines)", int),
    Flag(("--model",), "the checkpoint: a path that is the same on all nodes, or a hub id (default: none)"),
    Flag(("--gpu",), "for GPUs (default: CPUs)", switch=True),
)
NODE_FLAGS = (
    Flag(("--ranks-per-node",), "ranks on each machine (default: 1)", int),
    Flag(("--ssh-user",), "the user on the machines (default: ubuntu; local: who runs this)", metavar="NAME"),
    Flag(("--ssh-key",), "private key for them; none: ssh's own (default, local: ~/.ssh/id_ed25519)", metavar="FILE"),
    Flag(("--venv",), "Python environment on the machines (default: ~/metrale-ray-venv)", metavar="DIR"),
    Flag(("--python",), "interpreter that makes the environment (default: python3)", metavar="NAME"),
    Flag(
        ("--package",),
        "what pip installs where the environment lacks it: a requirement, or a wheel of this machine; none: the "
        "machines must have it (default: this version, from the index)",
    ),
    Flag(("--constraints",), "file of this machine with the versions that pip may take", metavar="FILE"),
    Flag(
        ("--torch-index",),
        "index of torch alone, such as PyTorch's own of builds for CPUs, which are smaller (default: where the "
        "machines' pip takes all)",
        metavar="URL",
    ),
    Flag(("--token-file",), "this machine's file with Ray's token (default: ~/.ray/auth_token)", metavar="FILE"),
    Flag(("--dashboard-host",), "where Ray's dashboard listens (default: 127.0.0.1)", metavar="127.0.0.1|0.0.0.0"),
)
LOCAL_FLAGS = (
    Flag(("--head-ip",), "address of the first machine, which holds rank 0", metavar="IP"),
    Flag(("--worker-ips",), "the others, with commas between them (default: none)", hosts, "HOSTS"),
)
CLOUD_FLAGS = (
    Flag(("--region",), "region (default, aws: us-west-2; gcp: us-central1)"),
    Flag(("--zone",), "zone (default: the region's a)"),
    Flag(("--instance-type",), "type of all machines (default, aws: m7i.8xlarge or g6e.4xlarge; gcp: c3-standard-22 or "
         "g2-standard-16)"),
    Flag(("--disk-gb",), "size of each machine's disk (default: 200)", int),
)  # fmt: skip
IMAGE_FLAG = Flag(("--image",), "image: of the machines, or of the pods (default, gcp: Ubuntu 24.04)")
AWS_FLAGS = (
    Flag(("--key-name",), "the account's pair of keys that --ssh-key is half of (default: Ray makes one)"),
    Flag(("--security-group",), "the machines' security group (default: Ray makes one)"),
)
GCP_FLAGS = (Flag(("--project",), "the project's id"),)
KUBERNETES_FLAGS = (
    Flag(("--kind",), "what to make (default: rayservice)", metavar="|".join(KINDS)),
    Flag(("--namespace",), "namespace (default: default)"),
    Flag(("--served-model-name",), "the model's name in requests (default: that of its folder)", metavar="NAME"),
    Flag(("--ranks-per-pod",), "ranks in each pod (default: 1)", int),
    Flag(("--cpus-per-rank",), "cores of each rank (default: 8)", int),
    Flag(("--memory",), "memory of each pod of ranks (default: 64Gi)", metavar="SIZE"),
    Flag(("--shm",), "shared memory of each pod, a part of its memory (default: 2Gi)", metavar="SIZE"),
    Flag(("--model-claim",), "volume claim with the model (default: models)", metavar="NAME"),
    Flag(("--data-claim",), "volume claim for files of jobs (default: none)", metavar="NAME"),
    Flag(("--keys-secret",), "Secret with the service's keys (default: NAME-keys)", metavar="NAME"),
    Flag(("--drain-timeout-s",), "seconds that running requests may take at the end (default: 30)", int),
    Flag(("--upgrade",), "how a changed cluster replaces the old one (default: NewCluster)", metavar="NewCluster|None"),
)
GROUPS = {
    "output": OUTPUT_FLAGS,
    "cluster": CLUSTER_FLAGS,
    "machines (local, aws, gcp)": NODE_FLAGS,
    "one's own machines (local)": LOCAL_FLAGS,
    "clouds (aws, gcp)": CLOUD_FLAGS,
    "image (aws, gcp, kubernetes)": (IMAGE_FLAG,),
    "aws": AWS_FLAGS,
    "gcp": GCP_FLAGS,
    "kubernetes": KUBERNETES_FLAGS,
}
TAKES = {
    "local": (*CLUSTER_FLAGS, *NODE_FLAGS, *LOCAL_FLAGS),
    "aws": (*CLUSTER_FLAGS, *NODE_FLAGS, *CLOUD_FLAGS, IMAGE_FLAG, *AWS_FLAGS),
    "gcp": (*CLUSTER_FLAGS, *NODE_FLAGS, *CLOUD_FLAGS, IMAGE_FLAG, *GCP_FLAGS),
    "kubernetes": (*CLUSTER_FLAGS, IMAGE_FLAG, *KUBERNETES_FLAGS),
}
