# SPDX-License-Identifier: MIT OR Apache-2.0
"""The shortest way from prompts to texts: an engine of one's own, and one call.

    python examples/generate.py --model path/to/checkpoint --ep-size 2 "The capital of France is" "Once upon a time"

It starts a Ray on this machine, or joins the one at RAY_ADDRESS, and ends the engine when it is done.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from metrale_ray import LLM, SamplingParams


def main(arguments: Sequence[str] | None = None) -> int:
    """Write each prompt with its answer; the exit code is 1 where one has failed."""
    flags = argparse.ArgumentParser(description="Complete prompts.")
    flags.add_argument("--model", required=True)
    flags.add_argument("--ep-size", type=int, default=1)
    flags.add_argument("--max-tokens", type=int, default=32)
    flags.add_argument("prompts", nargs="+")
    given = flags.parse_args(arguments)
    num_failed = 0
    with LLM(given.model, ep_size=given.ep_size) as llm:
        # Answers come in the order of the prompts. One that fails has its error, and the others go on.
        for result in llm.generate(given.prompts, SamplingParams(temperature=0.0, max_tokens=given.max_tokens)):
            answer = result.outputs[0]
            num_failed += answer.error is not None
            print(f"{result.prompt!r}: {answer.error or repr(answer.text)}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
