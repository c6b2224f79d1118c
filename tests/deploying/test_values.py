# SPDX-License-Identifier: MIT OR Apache-2.0
"""What may be written for an option, and what is refused by name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.deploying import values
from metrale_ray.errors import UserError

CHECKS: dict[str, Callable[[str, str], str]] = {
    check.__name__: check
    for check in (
        values.cluster_name,
        values.address,
        values.host,
        values.ssh_user,
        values.path,
        values.model,
        values.requirement,
        values.index_url,
        values.python,
        values.instance_type,
        values.cloud_name,
        values.project,
        values.aws_image,
        values.aws_security_group,
        values.gcp_image,
        values.key_name,
    )
}
GOOD = [
    ("cluster_name", ["m", "metrale-ray", "a1", "a" * 40]),
    ("address", ["10.0.0.10", "192.168.1.255", "203.0.113.7"]),
    ("host", ["10.0.0.10", "node-1", "node1.example.com", "A-1"]),
    ("ssh_user", ["ubuntu", "_svc", "first.last", "a-b_c"]),
    ("path", ["/models/m", "~/a b", "/modèles/m", "~/.ssh/id_ed25519", "/a,b=c@d(e)"]),
    ("model", ["/models/m", "Qwen/Qwen3-30B-A3B", "~/m"]),
    ("requirement", ["metrale-ray[serve]==0.1.0", "metrale-ray @ https://a.b/c.tar.gz#x", "/m-0.1-py3-none-any.whl"]),
    ("index_url", ["https://a.b/whl/cpu", "http://10.0.0.1:8080/simple/", "https://a"]),
    ("python", ["python3", "/usr/bin/python3.12", "python"]),
    ("instance_type", ["m7i.8xlarge", "p5.48xlarge", "c3-standard-22", "u-6tb1.metal", "a3-highgpu-8g"]),
    ("cloud_name", ["us-west-2", "us-west-2a", "us-central1-a", "europe-west4"]),
    ("project", ["my-project-123456", "example.com:my-project"]),
    ("aws_image", ["ami-0123456789abcdef0", "ami-01234567"]),
    ("aws_security_group", ["sg-0123456789abcdef0"]),
    ("gcp_image", ["projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts", "projects/p/global/images/i"]),
    ("key_name", ["my key", "team@example"]),
]  # fmt: skip
BAD = [
    ("cluster_name", ["", "A", "1a", "a-", "a_b", "a" * 41, "a\n", "é"]),
    ("address", ["", "10.0.0", "10.0.0.256", "node-1", "::1", "127.0.0.1", "0.0.0.0", "224.0.0.1", " 10.0.0.1"]),
    ("host", ["", "-a", "a-", "a_b", "10.0.0.256", "1.2.3", "fe80::1", "a b", "a;b", "127.0.0.1", "a..b"]),
    ("ssh_user", ["", "-l", "a b", "1a", "root@host", "a" * 33]),
    ("path", ["", "relative", "~", "~/", "~user/x", "-rf", "/a'b", '/a"b', "/a$b", "/a`b", "/a%b", "/a\\b", "/a:b",
              "/a ", "/a\nb", "/a\u2028b", "/a\u200bb", "/" + "a" * 400, "/a\ud800"]),
    ("model", ["", "name", "../m", "a/b/c", "/a'b"]),
    ("requirement", ["", "-r x", "a\nb", "relative.whl", " a", "/my wheel-1-py3-none-any.whl", "/-x.whl"]),
    ("index_url", ["", "a.b/c", "ftp://a.b", "https://", "https://u:p@a.b/", "https://a.b/c d", "https://a.b/'"]),
    ("python", ["", "python3; rm", "bash", "python3 -c", "-python"]),
    ("instance_type", ["", "m7i", "m7i.8xlarge ", "$(x)"]),
    ("cloud_name", ["", "US-WEST-2", "us", "us-west-2\n"]),
    ("project", ["", "Project", "p", "a" * 31]),
    ("aws_image", ["", "ami-xyz", "latest_dlami", "resolve:ssm:/a"]),
    ("aws_security_group", ["", "default"]),
    ("gcp_image", ["", "ubuntu", "family/ubuntu"]),
    ("key_name", ["", " a", "a\n"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "texts"), GOOD)
def test_what_is_good_comes_back_unchanged(name: str, texts: list[str]) -> None:
    assert [CHECKS[name](text, "--flag") for text in texts] == texts


@pytest.mark.parametrize(("name", "texts"), BAD)
def test_what_is_wrong_is_refused_with_the_flag_and_the_value(name: str, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(UserError, match=re.escape(f"--flag is {text[:80]!r}; give ")):
            CHECKS[name](text, "--flag")


@given(st.sampled_from(sorted(CHECKS)), st.text())
def test_any_text_is_one_printable_line_or_refused(name: str, text: str) -> None:
    with contextlib.suppress(UserError):
        assert CHECKS[name](text, "--flag") == text
        assert text.isprintable()
        assert not text.startswith("-")


def test_a_number_has_to_be_within_its_limits() -> None:
    assert values.count(3, "--ep-size", most=3) == 3
    for number in (0, -1, 4):
        with pytest.raises(UserError, match=f"--ep-size is {number}; give a number from 1 to 3"):
            values.count(number, "--ep-size", most=3)
