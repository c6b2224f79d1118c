# SPDX-License-Identifier: MIT OR Apache-2.0
"""A user's script that is ended in every way there is: it starts an engine, says how far it is, and does as told.

Its one argument is JSON: the model, the engine's settings, and what to do once the engine is ready: "idle" (until a
line comes), "step" (generate), "raise" or "raise in step".
"""

from __future__ import annotations

import json
import sys

from metrale_ray import LLM, SamplingParams


def main() -> None:
    given = json.loads(sys.argv[1])
    with LLM(given["model"], **given["settings"]) as llm:
        say("ready")
        if given["then"] == "raise":
            raise RuntimeError("the script broke")
        if "step" in given["then"]:
            for _ in llm.stream([1, 2], SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)):
                say("token")
                if given["then"] == "raise in step":
                    raise RuntimeError("the script broke")
        sys.stdin.readline()
    say("closed")


def say(word: str) -> None:
    print(word, flush=True)


if __name__ == "__main__":
    main()
