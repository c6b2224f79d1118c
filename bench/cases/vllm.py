# SPDX-License-Identifier: MIT OR Apache-2.0
"""vLLM for CPUs: one process, or workers in tensor parallel, driven step by step through its engine, greedy.

    python -m bench.cases.vllm MODEL [--workers 2] [--eager]

Compiled, as it is by default; each worker is bound to cores of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from bench.cases.case import Run, case_parser, measure, run_of

CACHE_GIB = 2
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def main() -> None:
    parser = case_parser(__doc__)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    args = parser.parse_args()
    os.environ.update(SETTINGS, VLLM_CPU_OMP_THREADS_BIND=_binding(args.threads, args.workers))
    from vllm import LLM  # reads the variables when it is imported

    began_s = time.perf_counter()
    llm = LLM(
        model=args.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=args.prompt + args.new + 16,
        enable_prefix_caching=False,
        tensor_parallel_size=args.workers,
        enforce_eager=args.eager,
        seed=0,
    )
    start_s = round(time.perf_counter() - began_s, 2)
    batches = _Batches(llm.llm_engine)
    for batch in args.batch:
        measure(args, batch, batches.answer, lambda: {"start_s": start_s})


class _Batches:
    """Asks an engine one batch after another."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._count = 0

    def answer(self, rows: Sequence[Sequence[int]], new: int) -> Run:
        """One batch, from its first request to its last token."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        began_s = time.perf_counter()
        arrivals: dict[str, list[float]] = {}
        for row in rows:
            self._count += 1
            arrivals[str(self._count)] = []
            self._engine.add_request(str(self._count), {"prompt_token_ids": list(row)}, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now_s = time.perf_counter()
            for output in outputs:
                times = arrivals[output.request_id]
                times += [now_s] * (len(output.outputs[0].token_ids) - len(times))
        return run_of(list(arrivals.values()), began_s)


def _binding(threads: int, workers: int) -> str:
    """The cores of each worker, such as "0-1|2-3"."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    share = len(cores) // workers
    return "|".join(",".join(map(str, cores[first : first + share])) for first in range(0, share * workers, share))


if __name__ == "__main__":
    main()
