# SPDX-License-Identifier: MIT OR Apache-2.0
"""`python -m metrale_ray.native`: whether the native core is there, and which instructions it uses."""

from __future__ import annotations

import sys

from metrale_ray.native import library


def main() -> int:
    """One line; 1 where there is no core."""
    if library.library() is None:
        sys.stdout.write(f"the native core is not there, so PyTorch's kernels will be used: {library.why_not()}\n")
        return 1
    sys.stdout.write(f"the native core is there and uses {library.instructions()} instructions\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
