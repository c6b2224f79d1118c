# SPDX-License-Identifier: MIT OR Apache-2.0
"""`python -m tests.conformance URL`: run the checks against any server, with OpenAI's Python and JavaScript clients.

One line for each check: ok, failed and why, or skipped and why. Exit code 0 when nothing failed, else 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from contextlib import closing

import openai

from tests.conformance import javascript
from tests.conformance.checks import Check, all_checks
from tests.conformance.target import FEATURES, NotApplicable, Target


def main(argv: list[str] | None = None) -> int:
    """Run all checks and give the exit code."""
    given = _parser().parse_args(argv)
    with closing(_target(given)) as target:
        num_failed = sum(_tell("python", check.name, _outcome(check, target)) for check in all_checks())
        if not given.no_javascript:
            num_failed += _run_javascript(target)
    print(f"{num_failed} failed" if num_failed else "all passed")
    return 1 if num_failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("url", metavar="URL", help="the server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", help="the model to ask for (default: the first that the server names)")
    parser.add_argument("--api-key", metavar="KEY", help="the key, which others on this machine can see")
    parser.add_argument("--api-key-env", metavar="NAME", help="name of the environment variable that holds the key")
    for feature, text in FEATURES.items():
        parser.add_argument(f"--no-{feature}", action="store_true", help=f"leave out {text}")
    parser.add_argument("--no-javascript", action="store_true", help="leave out the JavaScript client")
    return parser


def _target(given: argparse.Namespace) -> Target:
    url = given.url.rstrip("/").removesuffix("/v1")
    key = os.environ[given.api_key_env] if given.api_key_env else given.api_key
    missing = {name for name in FEATURES if getattr(given, f"no_{name.replace('-', '_')}")}
    if key is None:
        missing.add("keys")
    model = given.model
    if model is None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key or "none") as client:
            model = client.models.list().data[0].id
    return Target(url, model, key, frozenset(missing))


def _outcome(check: Check, target: Target) -> tuple[str, str]:
    """What came of a check: "ok", "failed" or "skipped", and why."""
    reason = check.missing(target)
    if reason is not None:
        return "skipped", reason
    try:
        check.run(target)
    except NotApplicable as error:
        return "skipped", str(error)
    except Exception as error:  # noqa: BLE001  whatever it is, it is what came of this check
        return "failed", _describe(error)
    return "ok", ""


def _describe(error: Exception) -> str:
    """The line that failed, and why: an assertion says nothing by itself."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "conformance" in frame.filename]
    return f"{type(error).__name__} {error} at {os.path.basename(frames[-1].filename)}: {frames[-1].line}"


def _run_javascript(target: Target) -> int:
    reason = javascript.missing()
    if reason is not None:
        _tell("javascript", "all", ("skipped", reason))
        return 0
    return sum(_tell("javascript", name, outcome) for name, outcome in javascript.run(target).items())


def _tell(client: str, name: str, outcome: tuple[str, str]) -> bool:
    """Print one line. Whether it is a failure."""
    kind, why = outcome
    print(f"{kind:7} {client}: {name.replace('_', ' ')}{' (' + why + ')' if why else ''}", flush=True)
    return kind == "failed"


if __name__ == "__main__":
    sys.exit(main())
