# SPDX-License-Identifier: MIT OR Apache-2.0
"""The flags of `metrale-ray bench serve`, in tables. What it leaves out: what the command does (`cli_bench`)."""

from __future__ import annotations

import argparse
import math

from metrale_ray.cli_flags import Flag, seconds


def rate(text: str) -> float:
    """A rate or a factor: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, such as 2.5")
    return value


def positive(text: str) -> int:
    """An integer above 0."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer above 0")
    return int(text)


TARGET_FLAGS = (
    Flag(("--url",), "the server, such as http://127.0.0.1:8000; /v1 at its end may be left out", metavar="URL"),
    Flag(("--model",), "the model to ask for (default: the first that the server names)", metavar="NAME"),
    Flag(("--endpoint",), "what is asked (default: completions)", metavar="chat|completions"),
    Flag(("--api-key-env",), "name of the environment variable that holds the key", metavar="NAME"),
    Flag(("--timeout-s",), "seconds without a byte until a request has failed (default: 600)", seconds, "X"),
)
LOAD_FLAGS = (
    Flag(
        ("--concurrency",), "clients, each sending its next request when its last has ended (default: 8)", positive, "N"
    ),
    Flag(("--rate",), "instead: requests a second on average, at random times, whether or not answers come", rate, "X"),
    Flag(
        ("--trace",), "instead: times and lengths from a CSV file, gzipped or not, as Azure's LLM traces", str, "FILE"
    ),
    Flag(("--speed",), "with --trace: how many times as quick (default: 1)", rate, "X"),
    Flag(("--requests",), "requests in all (default: 100, or the whole trace; no end with --seconds)", positive, "N"),
    Flag(("--seconds",), "no new request after so many seconds", seconds, "X"),
    Flag(("--seed",), "another seed gives other prompts, lengths and times (default: 0)", int),
)
PROMPT_FLAGS = (
    Flag(
        ("--input-len",),
        "tokens of a prompt: 128, uniform:16:512 or lognormal:MEAN:SIGMA (default: 128)",
        metavar="LENGTHS",
    ),
    Flag(("--output-len",), "tokens to generate, in the same forms (default: 128)", metavar="LENGTHS"),
    Flag(("--max-input-len",), "cut longer prompts to this", positive, "N"),
    Flag(("--max-output-len",), "cut longer answers to this", positive, "N"),
    Flag(
        ("--vocab-size",), "prompts of random token ids below this, for a server that has no /tokenize", positive, "N"
    ),
    Flag(
        ("--prompts-file",),
        'instead: a file with {"prompt": ...} or {"prompt_token_ids": [...]} in each line',
        metavar="FILE",
    ),
    Flag(
        ("--stop-at-eos",), "let answers end by themselves (default: ignore_eos where the server takes it)", switch=True
    ),
    Flag(("--temperature",), "sent with each request (default: the server's)", float),
)
