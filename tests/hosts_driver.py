# SPDX-License-Identifier: MIT OR Apache-2.0
"""A driver in a process of its own, on whatever host it is started: it takes orders as lines of JSON, and answers so.

    python -m tests.hosts_driver RAY_ADDRESS

Orders, each a mapping with `do`: `start` (settings, head_on), `generate` (prompts, max_tokens), `stream` (prompt,
max_tokens, tell_after: first an answer after so many tokens, then the last one), `doctor` (model), `close`. An error of
ours is an answer with `error`, `message` and `rank`. It ends when its input does.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from metrale_ray import LLM, SamplingParams
from metrale_ray.doctor.cluster_rules import judge
from metrale_ray.doctor.finding import as_mapping
from metrale_ray.doctor.nodes import examine
from metrale_ray.errors import MetraleError

PLACED_S = 20.0
EXAMINED_S = 60.0


class Driver:
    """One engine at a time."""

    def __init__(self) -> None:
        self._llm: LLM | None = None

    def start(self, settings: dict[str, Any], head_on: str) -> dict[str, Any]:
        """Start an engine whose rank 0 is on the node with that address."""
        held = _make_others_fuller(head_on)
        started = time.monotonic()
        try:
            llm = self._llm = LLM(**settings)
        finally:
            for group in held:
                remove_placement_group(group)
        return {"ranks": llm.stats()["ranks"], "seconds": time.monotonic() - started}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Greedy answers to all prompts."""
        outputs = self._engine().generate(prompts, _greedy(max_tokens), progress=False)
        return {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}

    def stream(self, prompt: list[int], max_tokens: int, tell_after: int) -> dict[str, Any]:
        """One answer, and a word in the middle of it."""
        num_tokens = 0
        for output in self._engine().stream(prompt, _greedy(max_tokens)):
            before, num_tokens = num_tokens, len(output.outputs[0].token_ids)
            if before < tell_after <= num_tokens:
                _say({"num_tokens": num_tokens})
        return {"num_tokens": num_tokens}

    def doctor(self, model: str) -> dict[str, Any]:
        """What the doctor finds on all nodes."""
        facts = examine(sys.argv[1], model, None, EXAMINED_S)
        return {"nodes": [node.name for node in facts.nodes], "findings": list(map(as_mapping, judge(facts)))}

    def close(self) -> dict[str, Any]:
        """End the engine, if there is one."""
        llm, self._llm = self._llm, None
        started = time.monotonic()
        if llm is not None:
            llm.close()
        return {"seconds": time.monotonic() - started}

    def _engine(self) -> LLM:
        if self._llm is None:
            raise LookupError("start comes first")
        return self._llm


def _make_others_fuller(address: str) -> list[PlacementGroup]:
    """Hold some of every other node, as Ray places the first bundle on the node that has most left."""
    others = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    groups = [placement_group([{"CPU": 0.5, f"node:{other}": 0.001}]) for other in others if other != address]
    ray.get([group.ready() for group in groups], timeout=PLACED_S)
    return groups


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=sys.__stdout__, flush=True)


def main() -> None:
    sys.stdout = sys.stderr  # what Ray prints is no answer
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
    driver = Driver()
    _say({"nodes": sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            _say(getattr(driver, order.pop("do"))(**order))
        except MetraleError as error:
            _say({"error": type(error).__name__, "message": error.message, "rank": getattr(error, "rank", None)})
    driver.close()


if __name__ == "__main__":
    main()
