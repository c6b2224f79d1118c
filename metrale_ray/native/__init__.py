# SPDX-License-Identifier: MIT OR Apache-2.0
"""The native core: kernels for CPUs and shared memory between ranks, in C++, by way of ctypes.

Rules: nothing here knows torch. Callers pass addresses; who owns the memory is theirs to know. Where the core is not
built, everything else works without it.
"""
