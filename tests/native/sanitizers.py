# SPDX-License-Identifier: MIT OR Apache-2.0
"""`python -m tests.native.sanitizers [arguments of pytest]`: the tests of the native core, with cores built for them.

First one as it is delivered, and the widest sets' text without their instructions beside it. Then one under the
sanitizers of addresses and of undefined behaviour, which end a test's process at the first fault; leaks are not looked
for, as Python frees nothing at its end. Needs g++ with its sanitizers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from metrale_ray.native.compile import SETS, WIDE, BuildFailed, compile_library, find_compiler

TESTS = (
    "tests/native",
    "tests/model/kernels",
    "tests/model/attention/test_native.py",
    "tests/model/test_segment.py",
    "tests/model/test_shared_memory.py",
)
FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}


def main(arguments: Sequence[str]) -> int:
    """Build and test both; the exit code of the first run that fails."""
    with tempfile.TemporaryDirectory(prefix="metrale-sanitized-") as folder:
        for name, flags in (("plain", ()), ("sanitized", FLAGS)):
            library = Path(folder) / f"{name}.so"
            try:
                sets = compile_library(library, flags, (WIDE, *SETS))
                variables = _preload() | OPTIONS if flags else {}
            except BuildFailed as error:
                print(f"error: the {name} core was not built: {error}", file=sys.stderr)
                return 1
            print(f"== the {name} core, built for {', '.join(sets)}", flush=True)
            command = [sys.executable, "-m", "pytest", "--timeout=3600", *TESTS, *arguments]
            code = subprocess.call(command, env=os.environ | variables | {"METRALE_NATIVE_LIBRARY": str(library)})
            if code:
                return code
    return 0


def _preload() -> dict[str, str]:
    """The sanitizers' own library must be the first of a process. Raises BuildFailed where the compiler has none."""
    asked = [find_compiler(), "-print-file-name=libasan.so"]
    found = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        raise BuildFailed(f"{asked[0]} has no libasan.so; install the sanitizers of g++, or name g++ with CXX")
    return {"LD_PRELOAD": found}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
