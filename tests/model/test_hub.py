# SPDX-License-Identifier: MIT OR Apache-2.0
"""Hub ids: the cache without network, and refusals within seconds. A small server stands for the hub."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from metrale_ray.errors import ConfigError
from metrale_ray.model import hub

COMMIT = "c" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"twice",
    "modeling_evil.py": b"code",
    "onnx/config.json": b"{}",
}


class FakeHub(BaseHTTPRequestHandler):
    """Answers what a download of one public model, `owner/model`, asks for."""

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path = self.path.split("?")[0]
        headers, status, body = {}, 200, b""
        name = path.removeprefix(f"/owner/model/resolve/{COMMIT}/")
        if path in ("/api/models/owner/model", "/api/models/owner/model/revision/main"):
            body = json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": []}).encode()
        elif path.startswith("/api/models/owner/model/revision/"):
            status, headers = 404, {"X-Error-Code": "RevisionNotFound"}
        elif path.startswith(f"/api/models/owner/model/tree/{COMMIT}"):
            tree = [{"type": "file", "path": n, "size": len(c), "oid": f"oid-{n}"} for n, c in FILES.items()]
            body = json.dumps(tree).encode()
        elif name in FILES:
            body, headers = FILES[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{name.replace("/", "-")}"'}
        else:
            status, headers = 404, {"X-Error-Code": "RepoNotFound"}
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    # Nothing listens there.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path / "cache"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            huggingface_hub.constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield
        server.shutdown()
        thread.join()


def put_into_cache(cache: Path) -> Path:
    snapshot = cache / "models--owner--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (cache / "models--owner--model" / "refs").mkdir()
    (cache / "models--owner--model" / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.mark.usefixtures("server")
def test_a_download_fetches_weights_configuration_and_tokenizer_and_no_pickle_and_no_code() -> None:
    folder = hub.locate("owner/model", None)
    names = {str(file.relative_to(folder)) for file in folder.rglob("*")}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert (folder / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.usefixtures("server")
def test_what_was_downloaded_is_found_again_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub.locate("owner/model", None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert hub.locate("owner/model", None) == folder
    assert hub.locate("owner/model", COMMIT) == folder


@pytest.mark.usefixtures("server")
def test_a_wrong_id_and_a_wrong_revision_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'owner/nope' is not available: .* 404"):
        hub.locate("owner/nope", None)
    with pytest.raises(ConfigError, match=r"'own--er/name' is not available: .*own--er"):
        hub.locate("own--er/name", None)
    with pytest.raises(ConfigError, match="'owner/model' at revision 'v9' is not available"):
        hub.locate("owner/model", "v9")


def test_without_network_the_cache_is_used(cache: Path) -> None:
    snapshot = put_into_cache(cache)
    assert hub.locate("owner/model", None) == snapshot
    assert hub.locate("owner/model", COMMIT) == snapshot


def test_without_network_and_cache_the_refusal_names_what_was_looked_for_within_seconds(tmp_path: Path) -> None:
    start_s = time.monotonic()
    with pytest.raises(ConfigError, match=f"no folder {tmp_path}/owner/model, and the hub or its local cache has no"):
        hub.locate("owner/model", None)
    assert time.monotonic() - start_s < 5


def test_a_hub_that_takes_the_connection_and_says_nothing_is_given_up(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "REACH_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConfigError, match="is not available"):
            hub.locate("owner/model", None)
        snapshot = put_into_cache(cache)
        assert hub.locate("owner/model", None) == snapshot


def test_offline_mode_asks_no_server(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="offline mode is enabled"):
        hub.locate("owner/model", None)
    snapshot = put_into_cache(cache)
    assert hub.locate("owner/model", None) == snapshot


@pytest.mark.usefixtures("server")
def test_what_is_not_in_the_cache_is_not_found_and_nothing_is_fetched(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.find("owner/model", None) is None
    assert not cache.exists()
    for offline, end in ((False, "a start would fetch it whole"), (True, "HF_HUB_OFFLINE keeps a start from")):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
        assert f"'owner/model' at revision 'v1' is not in the hub's cache here ({cache})" in hub.absence(
            "owner/model", "v1"
        )
        assert end in hub.absence("owner/model", "v1")
        assert hub.can_fetch() is not offline


@pytest.mark.usefixtures("server")
def test_what_was_downloaded_is_found_and_of_it_only_what_has_weights(cache: Path) -> None:
    snapshot = put_into_cache(cache)
    assert hub.find("owner/model", None) is None  # a configuration alone
    folder = hub.locate("owner/model", None)
    assert folder == snapshot
    assert hub.find("owner/model", None) == hub.find("owner/model", COMMIT) == folder
    assert hub.find("owner/model", "other") is None
    assert hub.find(str(folder), None) == folder


@pytest.mark.parametrize("model", ["/no/such/folder", "own--er/name"])
def test_what_is_no_model_is_refused_whether_or_not_it_may_be_fetched(model: str) -> None:
    for look in (hub.find, hub.locate):
        with pytest.raises(ConfigError, match=model):
            look(model, None)


@pytest.mark.parametrize("model", ["a/b/c", "../x", "/x/y", "a b/c", "owner/", "/name", "own..er/na--me/", "owner/.x"])
def test_what_cannot_be_a_hub_id_asks_no_server(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_download", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(ConfigError, match="was not found"):
        hub.locate(model, None)
