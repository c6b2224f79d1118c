# SPDX-License-Identifier: MIT OR Apache-2.0
"""`SideStream`: one long stream on a thread of its own, whose largest gap tells how much others are held up."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import httpx

from tests.fixtures.tiny import VOCAB_SIZE
from tests.serve.soak.replies import EventReader
from tests.service_rig import MODEL_NAME
from tests.test_head import TIMEOUT_S

MAX_MODEL_LEN = 30_000
"""Of the model that the stream runs on: it must not end before the test does."""


class SideStream:
    """Runs from `with` to the end of it, where its tokens are checked."""

    def __init__(self, url: str) -> None:
        self.largest_gap_s = 0.0
        self._url = url
        self._reader = EventReader()
        self._has_begun = threading.Event()
        self._is_over = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="side-stream", daemon=True)

    def __enter__(self) -> SideStream:
        self._thread.start()
        assert self._has_begun.wait(TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join(TIMEOUT_S)
        if error is None:
            assert not self._thread.is_alive(), "the stream stands still"
            assert self._failure is None, self._failure
            token_ids = self._reader.reply.sequences[0].token_ids
            assert token_ids == [(1 + place) % VOCAB_SIZE for place in range(1, 1 + len(token_ids))]

    def _run(self) -> None:
        try:
            self._read()
        except Exception as error:  # noqa: BLE001  told by the thread that waits for this one
            self._failure = error

    def _read(self) -> None:
        body = {"model": MODEL_NAME, "prompt": [1], "max_tokens": MAX_MODEL_LEN, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        with (
            httpx.Client(base_url=self._url, timeout=TIMEOUT_S, trust_env=False) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            assert response.status_code == 200, response.read()
            last_s: float | None = None
            for data in response.iter_raw():
                now_s = time.monotonic()
                if last_s is not None:
                    self.largest_gap_s = max(self.largest_gap_s, now_s - last_s)
                last_s = now_s
                self._reader.push(data)
                self._has_begun.set()
                if self._is_over.is_set():
                    return
        raise AssertionError("the stream ended before the test did")
