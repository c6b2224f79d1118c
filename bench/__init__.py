# SPDX-License-Identifier: MIT OR Apache-2.0
"""Benchmarks; see README.md in this folder. Each is run from the repository's root, as `python -m bench.NAME`.

Rules: every figure is measured in the run that prints it, beside the load that others put on the machine meanwhile.
What runs in a peer's environment imports nothing but the standard library, the files of `cases`, and the peer.
"""
