# SPDX-License-Identifier: MIT OR Apache-2.0
"""llama.cpp, by llama-cpp-python's bindings of its batch interface: the largest logit of each sequence is taken.

    python -m bench.cases.llama MODEL --file FILE.gguf [--no-repack]

The checkpoint is written as FILE.gguf first where it is not there; a name that ends in `.q8_0.gguf` makes it Q8_0.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy

from bench.cases.case import Run, case_parser, measure
from bench.cases.gguf import ensure_gguf

CACHE_STEP = 256  # llama.cpp rounds each sequence's part of the cache up to so many tokens
MICRO_BATCH = 512  # tokens computed at a time, its default


def main() -> None:
    parser = case_parser(__doc__)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--no-repack", action="store_true", help="leave weights as they are in the file")
    args = parser.parse_args()
    ensure_gguf(Path(args.model), args.file)
    llama_cpp.llama_backend_init()
    silent = llama_cpp.llama_log_callback(_say_nothing)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    model = _load(args.file, repack=not args.no_repack)
    for batch in args.batch:
        with _context(args, model, batch) as context:
            measure(args, batch, _Batches(model, context).answer)


class _Batches:
    """Asks one context one batch after another."""

    def __init__(self, model: Any, context: Any) -> None:
        self._context = context
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def answer(self, rows: Sequence[Sequence[int]], new: int) -> Run:
        """One batch, from an empty cache on."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        length = len(rows[0])
        frame = llama_cpp.llama_batch_init(len(rows) * length, 0, 1)
        began_s = time.perf_counter()
        places = [(row, place) for row in range(len(rows)) for place in range(length)]
        for index, (row, place) in enumerate(places):
            _put(frame, index, rows[row][place], place, row, place == length - 1)
        self._decode(frame, len(places))
        tokens = [self._best(row * length + length - 1) for row in range(len(rows))]
        first_s = time.perf_counter()
        for step in range(new - 1):
            for row, token in enumerate(tokens):
                _put(frame, row, token, length + step, row, True)
            self._decode(frame, len(rows))
            tokens = [self._best(row) for row in range(len(rows))]
        ended_s = time.perf_counter()
        llama_cpp.llama_batch_free(frame)
        return Run(first_s - began_s, ended_s - first_s, len(rows) * (new - 1))

    def _decode(self, frame: Any, num_tokens: int) -> None:
        frame.n_tokens = num_tokens
        status = llama_cpp.llama_decode(self._context, frame)
        if status != 0:
            raise RuntimeError(f"llama_decode of {num_tokens} tokens gave {status}")

    def _best(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        return int(numpy.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


def _put(frame: Any, index: int, token: int, place: int, row: int, wants_logits: bool) -> None:
    frame.token[index] = token
    frame.pos[index] = place
    frame.n_seq_id[index] = 1
    frame.seq_id[index][0] = row
    frame.logits[index] = wants_logits


def _load(file: Path, *, repack: bool) -> Any:
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_extra_bufts = repack
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {file}")
    return model


@contextmanager
def _context(args: Any, model: Any, batch: int) -> Iterator[Any]:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = batch * -(-(args.prompt + args.new) // CACHE_STEP) * CACHE_STEP
    params.n_batch = batch * args.prompt
    params.n_ubatch = min(MICRO_BATCH, batch * args.prompt)
    params.n_seq_max = batch
    params.n_threads = params.n_threads_batch = args.threads
    params.kv_unified = False
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"llama.cpp makes no context for {batch} sequences")
    try:
        yield context
    finally:
        llama_cpp.llama_free(context)


def _say_nothing(level: int, text: bytes, data: Any) -> None:
    """Instead of llama.cpp's own messages."""


if __name__ == "__main__":
    main()
