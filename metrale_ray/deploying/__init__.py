# SPDX-License-Identifier: MIT OR Apache-2.0
"""Files that bring a cluster up: from checked options to commented YAML.

What it leaves out: questions and flags (`cli_cluster`), and starting anything.
"""
