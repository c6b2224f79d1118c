# SPDX-License-Identifier: MIT OR Apache-2.0
"""deploy/smoke.sh against a live service, and against servers that do all kinds of wrong."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from metrale_ray.serve.http.settings import HttpSettings
from tests.deploying.fake_service import RIGHT, Answer, FakeService, chat, delta, stream
from tests.service_rig import MODEL_NAME, serving, write_model

pytestmark = pytest.mark.processes

SMOKE = Path(__file__).parents[2] / "deploy" / "smoke.sh"
KEY = "a-key\"with\\odd'characters$(x)"
TIMEOUT_S = 60.0
WRONG, MISTAKE, NOT_READY, NO_KEY = 1, 2, 3, 4
HTML = Answer(body="<html><body>It works!\x1b[31m</body></html>", kind="text/html")


def run(folder: Path, *arguments: str, shell: str = "sh", **variables: str) -> subprocess.CompletedProcess[str]:
    """One run in an environment that holds nothing else, with `folder` for its files. None may be left."""
    folder = folder / "tmp"
    folder.mkdir(exist_ok=True)
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(folder), **variables}
    done = subprocess.run(
        [shell, str(SMOKE), *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        text=True,
        capture_output=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert list(folder.iterdir()) == []
    return done


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    """A live service without a key."""
    with serving(model) as rig:
        yield rig.url


@pytest.fixture(scope="module")
def guarded(model: Path) -> Iterator[str]:
    """A live service that wants KEY."""
    with serving(model, settings=HttpSettings(api_keys=(KEY,))) as rig:
        yield rig.url


def test_the_linter_finds_nothing() -> None:
    linter = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([linter, SMOKE], text=True, capture_output=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout
    assert os.access(SMOKE, os.X_OK)


@pytest.mark.parametrize("shell", [shell for shell in ("sh", "bash") if shutil.which(shell)])
def test_a_service_that_works_passes(url: str, tmp_path: Path, shell: str) -> None:
    done = run(tmp_path, url, shell=shell)
    assert (done.returncode, done.stderr) == (0, "")
    ready, named, answer, streamed, end = done.stdout.splitlines()
    assert ready.startswith("ready after ")
    assert named == f"model {MODEL_NAME}"
    assert answer.startswith('chat: "')
    assert answer.endswith("(length)")
    assert streamed.startswith("stream: ")
    assert "[DONE]" in streamed
    assert end == "ok"


@pytest.fixture
def base_url(model: Path, tmp_path: Path) -> Iterator[str]:
    """A live service of a model that has a tokenizer, and no chat template."""
    folder = Path(shutil.copytree(model, tmp_path / "base"))
    (folder / "chat_template.jinja").unlink()
    with serving(folder) as rig:
        yield rig.url


def test_a_model_without_a_chat_template_completes_a_text(base_url: str, tmp_path: Path) -> None:
    done = run(tmp_path, base_url)
    assert (done.returncode, done.stderr) == (0, "")
    _, _, told, answer, streamed, end = done.stdout.splitlines()
    assert told == "chat: the model has no chat template; it is asked to complete a text"
    assert answer.startswith('completion: "')
    assert answer.endswith("(length)")
    assert "[DONE] (length)" in streamed
    assert end == "ok"


def test_another_refusal_of_a_chat_is_no_reason_to_ask_for_less(tmp_path: Path) -> None:
    refusal = Answer(status=400, body='{"error": {"message": "no_chat_template", "code": "invalid_request"}}')
    with FakeService({"chat": refusal}) as service:
        done = run(tmp_path, service.url)
    assert done.returncode == WRONG
    assert "chat: status 400" in done.stderr


def test_the_url_may_end_as_clients_know_it(tmp_path: Path) -> None:
    with FakeService({}) as service:
        assert run(tmp_path, f"{service.url}/v1/").returncode == 0


def test_the_key_opens_a_service_that_wants_one(guarded: str, tmp_path: Path) -> None:
    done = run(tmp_path, guarded, METRALE_API_KEY=KEY)
    assert (done.returncode, done.stderr) == (0, "")
    assert KEY not in done.stdout


@pytest.mark.parametrize(
    ("key", "message"),
    [("", "the service wants a key (status 401); set METRALE_API_KEY"), ("another-key", "refuses the key")],
)
def test_a_key_that_is_missing_or_wrong_is_told_at_once(guarded: str, tmp_path: Path, key: str, message: str) -> None:
    done = run(tmp_path, guarded, METRALE_API_KEY=key)
    assert done.returncode == NO_KEY
    assert message in done.stderr
    assert not key or key not in done.stderr


def test_the_key_is_in_no_command_line_no_environment_and_no_file(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    spy, seen = tools / "curl", tmp_path / "seen"
    spy.write_text(
        f'#!/bin/sh\n{{ printf "%s\\n" "$@"; env; cat "$TMPDIR"/*/*; }} >> {seen}\nexec {shutil.which("curl")} "$@"\n'
    )
    spy.chmod(0o700)
    with FakeService({}) as service:
        done = run(tmp_path, service.url, METRALE_API_KEY=KEY, PATH=f"{tools}:{os.environ['PATH']}")
        assert done.returncode == 0, done.stderr
        assert {headers["Authorization"] for _, headers, _ in service.asked} == {f"Bearer {KEY}"}
    assert "--config" in seen.read_text()
    assert KEY not in seen.read_text() + done.stdout + done.stderr


def test_a_redirection_does_not_get_the_key(tmp_path: Path) -> None:
    with FakeService({"ready": Answer(status=302)}) as service:
        done = run(tmp_path, "--wait", "0", service.url, METRALE_API_KEY=KEY)
        assert len(service.asked) == 1
    assert done.returncode == NOT_READY
    assert "status 302" in done.stderr


def test_nobody_at_the_port_is_not_ready(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = run(tmp_path, f"http://127.0.0.1:{port}", "--wait", "0")
    assert done.returncode == NOT_READY
    assert "not ready after 0 s: curl: (7)" in done.stderr
    assert done.stdout == ""


def test_a_service_that_is_still_coming_is_waited_for(tmp_path: Path) -> None:
    coming = [Answer(status=404, body="Path '/health/ready' not found"), Answer(body="{}")]
    with FakeService({"ready": coming}) as service:
        done = run(tmp_path, service.url)
        assert [place for place, _, _ in service.asked] == ["ready", "ready", "models", "chat", "stream"]
    assert done.returncode == 0


def test_a_service_that_stays_unready_is_told_with_its_reason(tmp_path: Path) -> None:
    with FakeService({"ready": Answer(status=503, body='{"error": {"message": "the engine is loading"}}')}) as service:
        done = run(tmp_path, service.url, "--wait", "0")
    assert done.returncode == NOT_READY
    assert "status 503" in done.stderr
    assert "the engine is loading" in done.stderr


REPLACED = Answer(status=503, body='{"error": {"message": "the engine starts", "code": "not_ready"}}')
CHECKS = ["models", "chat", "stream"]


@pytest.fixture
def clock(tmp_path: Path) -> dict[str, str]:
    """Variables for a run in which every look at the time is 4 s after the one before, and no pause takes time."""
    tools, now = tmp_path / "clock", tmp_path / "now"
    tools.mkdir()
    now.write_text("1000")
    (tools / "date").write_text(f'#!/bin/sh\nread -r now <{now}\necho "$now"\necho $((now + 4)) >{now}\n')
    (tools / "sleep").write_text("#!/bin/sh\n")
    for tool in tools.iterdir():
        tool.chmod(0o700)
    return {"PATH": f"{tools}:{os.environ['PATH']}"}


@pytest.mark.parametrize("shell", [shell for shell in ("sh", "bash") if shutil.which(shell)])
@pytest.mark.parametrize("place", CHECKS)
def test_a_service_that_is_replaced_meanwhile_is_waited_for_and_asked_all_again(
    tmp_path: Path, place: str, shell: str, clock: dict[str, str]
) -> None:
    with FakeService({"ready": [RIGHT["ready"], REPLACED, RIGHT["ready"]], place: [REPLACED, RIGHT[place]]}) as service:
        done = run(tmp_path, service.url, shell=shell, **clock)
        met = CHECKS[: CHECKS.index(place) + 1]
        assert [asked for asked, _, _ in service.asked] == ["ready", *met, "ready", "ready", *CHECKS]
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("ok\n")
    first, *_ = done.stderr.splitlines()
    assert re.fullmatch(r"waiting: \d+ s, (GET /v1/)?" + place + ": status 503: .*the engine starts.*", first), first


@pytest.mark.parametrize("place", CHECKS)
def test_a_service_that_is_replaced_for_too_long_is_not_ready(tmp_path: Path, place: str) -> None:
    with FakeService({place: REPLACED}) as service:
        done = run(tmp_path, service.url, "--wait", "0")
    assert done.returncode == NOT_READY
    (line,) = done.stderr.splitlines()
    assert re.search(rf"^error: not ready after \d+ s: .*{place}: status 503.*the engine starts.*`serve status`", line)


def test_another_model_after_the_replacement_is_the_one_that_is_asked(tmp_path: Path, clock: dict[str, str]) -> None:
    models = [Answer(body=json.dumps({"data": [{"id": name}]})) for name in ("old", "new")]
    with FakeService({"models": models, "stream": [REPLACED, RIGHT["stream"]]}) as service:
        assert run(tmp_path, service.url, **clock).returncode == 0
        assert [json.loads(body)["model"] for _, _, body in service.asked if body] == ["old", "old", "new", "new"]


def test_a_long_wait_says_every_ten_seconds_that_it_lasts(tmp_path: Path, clock: dict[str, str]) -> None:
    with FakeService({"ready": REPLACED}) as service:
        done = run(tmp_path, service.url, "--wait", "60", **clock)
    assert done.returncode == NOT_READY
    *words, end = done.stderr.splitlines()
    times_s = [int(re.match(r"waiting: (\d+) s, status 503: .*the engine starts", word)[1]) for word in words]  # type: ignore[index]
    assert times_s[0] >= 10
    assert all(10 <= later - earlier < 20 for earlier, later in itertools.pairwise(times_s))
    assert len(times_s) >= 3
    assert re.search(r"error: not ready after 6\d s: .*; on Ray Serve, `serve status` may say why$", end)


@pytest.mark.parametrize(("place", "code"), [("ready", NOT_READY), ("stream", WRONG)])
def test_an_answer_that_does_not_come_ends_in_time(tmp_path: Path, place: str, code: int) -> None:
    with FakeService({place: Answer(hangs=True)}) as service:
        done = run(tmp_path, service.url, "--wait", "1", "--timeout", "1")
    assert done.returncode == code
    assert "curl: (28)" in done.stderr


GOOD = {"role": "assistant", "content": "Paris."}
ERROR_EVENT = {"error": {"message": "rank 1 is gone", "code": "engine_dead"}}
BAD_LOGITS = Answer(status=500, body='{"error": {"message": "bad logits"}}')
CHAT, STREAM = "chat: the answer has ", "stream: the answer has "
WRONGS: dict[str, tuple[dict[str, Answer], str]] = {
    "a status": ({"chat": BAD_LOGITS}, "chat: status 500: .*bad logits"),
    "no model": ({"models": Answer(body='{"object": "list", "data": []}')}, "names no model"),
    "a page in place of models": ({"models": HTML}, "names no model: <html><body>It works!"),
    "a page in place of an answer": ({"chat": HTML}, f"{CHAT}no text: <html>"),
    "nothing": ({"chat": Answer(body="")}, rf"{CHAT}no text: \(nothing\)"),
    "an empty text": ({"chat": chat({"content": ""})}, f"{CHAT}no text"),
    "no text": ({"chat": chat({"content": None})}, f"{CHAT}no text"),
    "no end": ({"chat": chat(GOOD, None)}, f"{CHAT}no finish_reason"),
    "a failure": ({"chat": chat(GOOD, "error")}, "chat: the finish_reason is 'error'"),
    "half an answer": ({"chat": Answer(body='{"choices": []}', missing_bytes=3)}, r"chat: curl: \(18\)"),
    "a page in place of a stream": ({"stream": HTML}, "stream: no event came: <html>"),
    "an unended stream": ({"stream": stream(delta(GOOD, "stop"))}, r"stream: it ended without \[DONE\]"),
    "a stream of nothing": ({"stream": stream("[DONE]")}, f"{STREAM}no text"),
    "a stream without its end": ({"stream": stream(delta(GOOD), "[DONE]")}, f"{STREAM}no finish_reason"),
    "a stream that fails": ({"stream": stream(delta(GOOD), ERROR_EVENT)}, "ended with an error: .*rank 1 is gone"),
}


@pytest.mark.parametrize("name", WRONGS)
def test_a_wrong_answer_is_told(tmp_path: Path, name: str) -> None:
    changes, message = WRONGS[name]
    with FakeService(changes) as service:
        done = run(tmp_path, service.url, "--wait", "0")
    assert done.returncode == WRONG
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert re.search(message, line), line
    assert line.isprintable()


def test_a_key_that_is_refused_later_is_no_wrong_answer(tmp_path: Path) -> None:
    with FakeService({"chat": Answer(status=401)}) as service:
        assert run(tmp_path, service.url).returncode == NO_KEY


@pytest.mark.parametrize("text", ['\\"finish_reason\\": \\"error\\", "content": ""', '\n\t\\ "', "é☃", "data: [DONE]"])
def test_whatever_an_answer_says_is_text(tmp_path: Path, text: str) -> None:
    events = stream(delta({"content": text}), delta({}, "length"), "[DONE]")
    with FakeService({"chat": chat({"content": text}), "stream": events}) as service:
        done = run(tmp_path, service.url)
    assert (done.returncode, done.stderr) == (0, "")


def test_reasoning_is_an_answer_too(tmp_path: Path) -> None:
    with FakeService({"chat": chat({"content": None, "reasoning_content": "Hm."}, "length")}) as service:
        assert run(tmp_path, service.url).returncode == 0


def test_the_model_that_was_asked_for_is_asked(tmp_path: Path) -> None:
    models = Answer(body='{"data":[{"id":"a"},{"id":"b"}]}')
    with FakeService({"models": models}) as service:
        assert run(tmp_path, service.url, "--model", "b").returncode == 0
        assert {json.loads(body)["model"] for _, _, body in service.asked if body} == {"b"}
        done = run(tmp_path, service.url, "--model", "c")
    assert done.returncode == WRONG
    assert "the service has no model 'c'; it has: a b" in done.stderr


def test_a_model_of_any_name_is_asked(tmp_path: Path) -> None:
    name = 'a "b" \\ ☃ %s'
    with FakeService({"models": Answer(body=json.dumps({"data": [{"id": name}]}))}) as service:
        assert run(tmp_path, service.url).returncode == 0
        assert {json.loads(body)["model"] for _, _, body in service.asked if body} == {name}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no URL given"),
        (["127.0.0.1:8000"], "must begin with http:// or https://"),
        (["http://a", "http://b"], "two URLs, http://a and http://b"),
        (["--wat", "1", "http://a"], "unknown flag --wat"),
        (["http://a", "--wait"], "--wait needs a value"),
        (["http://a", "--wait", "1.5"], "--wait is '1.5'; it must be a whole number of seconds"),
        (["http://a", "--wait", ""], "--wait is ''"),
        (["http://a", "--wait", "12345678"], "--wait is '12345678'"),
        (["http://a", "--timeout", "0"], "--timeout is 0"),
        (["http://a", "--model", '"'], "--model may hold no quotes"),
    ],
)
def test_a_mistake_in_the_arguments_is_told(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == MISTAKE
    assert message in done.stderr


@pytest.mark.parametrize("key", ["two words", "two\nlines", "ünïcode"])
def test_a_key_that_no_service_has_is_refused_and_not_shown(tmp_path: Path, key: str) -> None:
    done = run(tmp_path, "http://127.0.0.1:1", METRALE_API_KEY=key)
    assert done.returncode == MISTAKE
    assert key not in done.stderr


def test_a_machine_without_curl_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, "http://a", shell=shutil.which("sh") or "sh", PATH=str(tmp_path))
    assert done.returncode == MISTAKE
    assert "curl is not installed" in done.stderr


def test_the_help_names_every_flag_and_its_default(tmp_path: Path) -> None:
    done = run(tmp_path, "--help")
    assert done.returncode == 0
    for text in ("--wait", "--timeout", "--model", "METRALE_API_KEY", "default: 60", "default: 120", "URL"):
        assert text in done.stdout


def test_a_run_that_is_terminated_leaves_no_file(tmp_path: Path) -> None:
    with FakeService({"chat": Answer(hangs=True)}) as service:
        environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
        argv = ["sh", str(SMOKE), service.url, "--timeout", "600"]
        process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, start_new_session=True)
        try:
            while process.stdout is not None and not process.stdout.readline().startswith(b"model"):
                assert process.poll() is None
            os.killpg(process.pid, signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
        finally:
            process.kill()
            process.communicate()
    assert list(tmp_path.iterdir()) == []
