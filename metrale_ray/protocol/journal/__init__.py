# SPDX-License-Identifier: MIT OR Apache-2.0
"""The journal: what the head ordered, what the ranks answered and what was decided, to be read and run again."""
