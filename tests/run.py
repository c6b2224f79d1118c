# SPDX-License-Identifier: MIT OR Apache-2.0
"""`python -m tests.run [arguments of pytest]`: all tests, in two processes of pytest beside each other.

One has the tests that start processes of their own: ranks, Rays, hosts. They run one after the other, and mostly wait.
The other has all the rest; what it writes is shown when it is done. The exit code is that of the part that failed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence

STARTS_PROCESSES = "ray or gloo or hosts or clusters or processes"
NO_TESTS = 5  # pytest's code when nothing was selected


def main(arguments: Sequence[str]) -> int:
    """Run both parts, and give the exit code."""
    if any(argument.startswith("-m") for argument in arguments):  # the caller has chosen
        return subprocess.call([*command(), *arguments])
    with tempfile.TemporaryFile("w+") as output:
        rest = subprocess.Popen(
            [*command(), "-m", f"not ({STARTS_PROCESSES})", *arguments], stdout=output, stderr=subprocess.STDOUT
        )
        print(f"== tests that start processes; the rest runs beside them as process {rest.pid}", flush=True)
        try:
            codes = [subprocess.call([*command(), "-m", STARTS_PROCESSES, *arguments]), rest.wait()]
        finally:
            rest.kill()
        output.seek(0)
        print(f"== the rest\n{output.read()}", flush=True)
    return next((code for code in codes if code not in (0, NO_TESTS)), min(codes))


def command() -> list[str]:
    return [sys.executable, "-m", "pytest"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
