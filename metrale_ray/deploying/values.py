# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a user may write for an option, checked before it goes into a file.

Each function takes the text and the flag that it came by, and gives the text back. Rules: whatever is let through is
one printable line, so that it can stand in a comment, and holds nothing that ssh, rsync or a shell would read as
something else. A wrong value is a UserError that names the flag, the value and what is allowed.
"""

from __future__ import annotations

import ipaddress
import re

from metrale_ray.errors import UserError

MAX_TEXT_LEN = 400  # a path or a requirement; longer ones are mistakes
HOST_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HOST = rf"{HOST_LABEL}(\.{HOST_LABEL})*"
CLUSTER_NAME = r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"
SSH_USER = r"[A-Za-z_][A-Za-z0-9_.-]{0,31}"
HUB_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
INSTANCE_TYPE = r"[a-z0-9]+([.-][a-z0-9]+)+"
CLOUD_NAME = r"[a-z][a-z0-9]*(-[a-z0-9]+)+"  # of a region or a zone
PROJECT = r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]"
AWS_IMAGE = r"ami-[0-9a-f]{8,17}"
AWS_SECURITY_GROUP = r"sg-[0-9a-f]{8,17}"
GCP_IMAGE = r"projects/[a-z0-9.:-]+/global/images/(family/)?[a-z0-9-]+"
PYTHON = r"([A-Za-z0-9/_.+][A-Za-z0-9/_.+-]*)?python[0-9.]*"
WHEEL = r"[A-Za-z0-9_][A-Za-z0-9_.+-]*\.whl"
INDEX_URL = r"https?://[A-Za-z0-9.:\[\]-]+(/[A-Za-z0-9._~%+=/-]*)?"
# What a shell, ssh (%), rsync or PATH (:) gives a meaning of its own.
NOT_IN_PATHS = "\"'\\$`%:*?[]{}<>|&;#!"


def cluster_name(text: str, flag: str) -> str:
    """A name that clouds and Kubernetes take too."""
    return _matching(text, flag, CLUSTER_NAME, "1 to 40 lower-case letters, digits and dashes, beginning with a letter")


def address(text: str, flag: str) -> str:
    """An IPv4 address by which other hosts reach this one."""
    _check_text(text, flag)
    try:
        parsed = ipaddress.IPv4Address(text)
    except ValueError as error:
        raise wrong(text, flag, "an IPv4 address, such as 10.0.0.10") from error
    if parsed.is_loopback or parsed.is_unspecified or parsed.is_multicast:
        raise wrong(text, flag, "an address by which the other nodes reach this one, such as 10.0.0.10")
    return text


def host(text: str, flag: str) -> str:
    """An IPv4 address or a name of a host."""
    if re.fullmatch(r"[0-9.]+", text):
        return address(text, flag)
    return _matching(text, flag, HOST, "an IPv4 address or the name of a host")


def ssh_user(text: str, flag: str) -> str:
    """A user's name on the nodes."""
    return _matching(text, flag, SSH_USER, "a user's name, such as ubuntu")


def path(text: str, flag: str) -> str:
    """A path from the root, or from a user's home by ~/."""
    _check_text(text, flag)
    begins_well = text.startswith("/") or (text.startswith("~/") and len(text) > 2)
    if not begins_well or any(letter in NOT_IN_PATHS for letter in text):
        raise wrong(text, flag, f"a path that begins with / or ~/ and has none of {NOT_IN_PATHS}")
    return text


def model(text: str, flag: str) -> str:
    """A checkpoint: a path that is the same on all nodes, or a hub id."""
    if re.fullmatch(HUB_ID, text):
        return text
    if text.startswith(("/", "~/")):
        return path(text, flag)
    raise wrong(text, flag, "a path that begins with /, the same on all nodes, or a hub id such as organisation/name")


def requirement(text: str, flag: str) -> str:
    """What pip installs: a requirement, or a wheel on this machine."""
    if text.endswith(".whl"):
        if re.fullmatch(WHEEL, text.rpartition("/")[2], re.ASCII) is None:
            raise wrong(text, flag, "the path of a wheel that has the name it was built with")
        return path(text, flag)
    _check_text(text, flag)
    if text.startswith("-"):
        raise wrong(text, flag, "a requirement such as metrale-ray[serve]==0.1.0, or a wheel's path")
    return text


def index_url(text: str, flag: str) -> str:
    """Where pip looks for packages. A name and password would be for everybody to read."""
    allowed = (
        "a URL that begins with https:// or http://, without a name and password, which pip's own settings may have"
    )
    return _matching(text, flag, INDEX_URL, allowed)


def python(text: str, flag: str) -> str:
    """An interpreter on the nodes."""
    return _matching(text, flag, PYTHON, "an interpreter on the nodes, such as python3 or /usr/bin/python3.12")


def instance_type(text: str, flag: str) -> str:
    """A cloud's type of machine."""
    return _matching(text, flag, INSTANCE_TYPE, "a type of machine, such as m7i.8xlarge or c3-standard-22")


def cloud_name(text: str, flag: str) -> str:
    """A region or a zone of a cloud."""
    return _matching(text, flag, CLOUD_NAME, "a region or zone, such as us-west-2, us-west-2a or us-central1-a")


def project(text: str, flag: str) -> str:
    """A project of Google's cloud."""
    return _matching(text, flag, PROJECT, "a project's id, such as my-project-123456")


def aws_image(text: str, flag: str) -> str:
    """An image of Amazon's cloud."""
    return _matching(text, flag, AWS_IMAGE, "an image's id, such as ami-0123456789abcdef0")


def aws_security_group(text: str, flag: str) -> str:
    """A security group of Amazon's cloud."""
    return _matching(text, flag, AWS_SECURITY_GROUP, "a security group's id, such as sg-0123456789abcdef0")


def gcp_image(text: str, flag: str) -> str:
    """An image, or a family of images, of Google's cloud."""
    return _matching(text, flag, GCP_IMAGE, "projects/PROJECT/global/images/family/FAMILY or .../images/IMAGE")


def key_name(text: str, flag: str) -> str:
    """The name of a pair of keys in Amazon's cloud."""
    return _matching(text, flag, r"[A-Za-z0-9][A-Za-z0-9 ._+=@-]{0,254}", "the name of a pair of keys")


def count(value: int, flag: str, *, most: int) -> int:
    """A number from 1 to `most`."""
    if not 1 <= value <= most:
        raise UserError(f"{flag} is {value}; give a number from 1 to {most}")
    return value


def wrong(text: str, flag: str, allowed: str) -> UserError:
    """The error that says what was given and what is allowed."""
    return UserError(f"{flag} is {text[:80]!r}; give {allowed}")


def _matching(text: str, flag: str, pattern: str, allowed: str) -> str:
    if re.fullmatch(pattern, text, re.ASCII) is None:
        raise wrong(text, flag, allowed)
    return text


def _check_text(text: str, flag: str) -> None:
    if not text or not text.isprintable() or len(text) > MAX_TEXT_LEN or text != text.strip():
        raise wrong(text, flag, f"one line of 1 to {MAX_TEXT_LEN} printable letters, without spaces at its ends")
