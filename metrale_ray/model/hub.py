# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where a model's files are: a folder as it is, or a hub id through the hub library's own cache.

Rules: only weights in safetensors, JSON and tokenizer files are fetched; pickled weights and code never are. The
library's settings hold (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN). Without network what is in the cache is used, and
otherwise the refusal comes within seconds. `find` looks at the cache alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from metrale_ray.errors import ConfigError

# owner/name, as the hub allows them.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "vocab.txt", "merges.txt")
# Folders in a repository hold other formats; `consolidated` holds the same weights under other names.
LEFT_OUT = ("*/*", "consolidated*", "*.bin", "*.pt")
# The library sets no timeout for its first request, and a network that swallows packets would hold it for minutes.
REACH_TIMEOUT_S = 10.0


def locate(model: str, revision: str | None) -> Path:
    """The folder with the files of `model`, a folder's path or a hub id, which is fetched. Raises ConfigError."""
    folder = _given_folder(model, revision)
    return _download(model, revision) if folder is None else folder


def find(model: str, revision: str | None) -> Path | None:
    """As `locate`, and nothing is fetched: None for a hub id whose weights are not in the cache. Raises ConfigError."""
    folder = _given_folder(model, revision)
    return _cached(model, revision) if folder is None else folder


def can_fetch() -> bool:
    """Whether the library's settings let it ask the hub."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE


def absence(model: str, revision: str | None) -> str:
    """What to say where `find` gives None: that the model is not there, and what a start would fetch."""
    from huggingface_hub import constants

    lead = f"model {model!r}{_at(revision)} is not in the hub's cache here ({constants.HF_HUB_CACHE})"
    if not can_fetch():
        return f"{lead}, and HF_HUB_OFFLINE keeps a start from fetching it"
    return f"{lead}; a start would fetch it whole: weights in safetensors, configuration and tokenizer files"


def _given_folder(model: str, revision: str | None) -> Path | None:
    """The folder that `model` is, None where it is a hub id. Raises ConfigError where it is neither."""
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ConfigError(f"revision {revision!r} was given for the folder {path}; a revision is for a hub id only")
        return path.resolve()
    if path.exists():
        raise ConfigError(f"model {model!r} is a file; give the folder that holds config.json and the weights")
    if not HUB_ID.fullmatch(model):
        raise ConfigError(
            f"model {model!r} was not found: there is no folder {path.absolute()}, and it is not a hub id (owner/name)"
        )
    return None


def _cached(model: str, revision: str | None) -> Path | None:
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = _snapshot(model, revision, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise _not_available(model, revision, error) from error
    # Other libraries fetch a configuration or a tokenizer alone.
    return folder if any(folder.glob("*.safetensors")) else None


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub.errors import EntryNotFoundError, HTTPError

    unreachable = _why_unreachable(model, revision)
    try:
        return _snapshot(model, revision, local_files_only=unreachable is not None)
    except (OSError, ValueError, EntryNotFoundError, HTTPError) as error:
        reason = unreachable if unreachable is not None else error
        raise _not_available(model, revision, reason) from error


def _snapshot(model: str, revision: str | None, *, local_files_only: bool) -> Path:
    import huggingface_hub

    folder = huggingface_hub.snapshot_download(
        model,
        revision=revision,
        allow_patterns=list(PATTERNS),
        ignore_patterns=list(LEFT_OUT),
        local_files_only=local_files_only,
    )
    return Path(folder)


def _why_unreachable(model: str, revision: str | None) -> Exception | None:
    """None when the hub has the model; the reason when the hub cannot say. Raises ConfigError when it says no."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        HfApi().model_info(model, revision=revision, timeout=REACH_TIMEOUT_S)
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise _not_available(model, revision, error) from error
    except (OSError, HTTPError) as error:
        return error
    return None


def _not_available(model: str, revision: str | None, reason: Any) -> ConfigError:
    lines = str(reason).strip().splitlines() or [type(reason).__name__]
    return ConfigError(
        f"model {model!r}{_at(revision)} is not available: there is no folder {Path(model).absolute()}, and the hub "
        f"or its local cache has no such model: {lines[0]}. Check the name, the network and HF_HUB_OFFLINE, or give a "
        "folder"
    )


def _at(revision: str | None) -> str:
    return "" if revision is None else f" at revision {revision!r}"
