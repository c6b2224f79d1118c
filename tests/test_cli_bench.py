# SPDX-License-Identifier: MIT OR Apache-2.0
"""`bench serve` against a server on a real socket: what it sends, what it writes, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.cli import main
from metrale_ray.traffic import bar, report
from tests.traffic.fake_server import KEY, FakeServer, running


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer()) as server:
        yield server


def bench(server: FakeServer, capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0) -> dict[str, Any]:
    """The report of a run with the flags."""
    capsys.readouterr()
    ended = main(["bench", "serve", "--url", server.url, "--json", *flags])
    written = capsys.readouterr()
    assert ended == code, written.err
    report: dict[str, Any] = json.loads(written.out)
    return report


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The error of a command that is the caller's mistake."""
    capsys.readouterr()
    assert main(["bench", "serve", *flags]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    return written.err


# What it sends


def test_completions_are_asked_with_token_ids_of_the_servers_tokenizer(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    report = bench(server, capsys, "--requests", "5", "--input-len", "7", "--output-len", "9", "--temperature", "0")
    assert len(server.asked) == 5
    for body in server.asked:
        assert body.keys() == {
            *("model", "stream", "max_tokens", "prompt", "ignore_eos", "stream_options", "temperature"),
        }
        assert (body["model"], body["max_tokens"], body["ignore_eos"]) == ("first", 9, True)
        assert len(body["prompt"]) == 7
        assert min(body["prompt"]) >= 100
    assert report["requests"]["succeeded"] == 5
    assert report["tokens"] == {"input": 35, "output": 45, "counted_by": "usage"}
    assert report["notes"] == []


def test_a_chat_is_asked_with_words_as_many_as_its_tokens(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--endpoint", "chat", "--model", "mine", "--requests", "3", "--input-len", "8", "--stop-at-eos")
    report = bench(server, capsys, *flags)
    assert {path for path in server.paths if "completions" in path} == {"/v1/chat/completions"}
    for body in server.asked:
        (message,) = body["messages"]
        assert message["role"] == "user"
        assert len(message["content"].split()) == 4  # the server's tokenizer makes two tokens of a word
        assert "ignore_eos" not in body
    assert report["model"] == "mine"
    assert report["inter_token_ms"]["p50"] is not None  # the role and the empty piece are no tokens
    assert report["finish_reasons"] == {"length": 3}


def test_an_address_with_a_version_is_the_same(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.url += "/v1/"
    bench(server, capsys, "--requests", "1")
    assert server.paths == ["/v1/models", "/tokenize", "/v1/completions", "/v1/completions"]


def test_without_a_tokenizer_prompts_are_words_unless_the_vocabulary_is_given(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.has_tokenizer = False
    bench(server, capsys, "--requests", "1", "--input-len", "6")
    assert len(server.asked[-1]["prompt"].split()) == 6
    bench(server, capsys, "--requests", "1", "--input-len", "50", "--vocab-size", "20")
    assert set(server.asked[-1]["prompt"]) <= set(range(20))


@pytest.mark.parametrize(
    ("refused", "note"),
    [
        (("list",), "prompts of token ids are refused"),
        (("ignore_eos",), "ignore_eos is refused"),
        (("stream_options",), "counted by pieces"),
        (("list", "ignore_eos", "stream_options"), "counted by pieces"),
    ],
)
def test_what_a_server_refuses_by_name_is_left_out_and_told(
    server: FakeServer, capsys: pytest.CaptureFixture[str], refused: tuple[str, ...], note: str
) -> None:
    server.refused = refused
    report = bench(server, capsys, "--requests", "2")
    assert report["requests"]["succeeded"] == 2
    assert note in " ".join(report["notes"])
    assert len(report["notes"]) == len(refused)


def test_prompts_of_a_file_are_sent_in_order_and_again_from_the_first(
    server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one two"}\n{"prompt_token_ids": [5, 6, 7]}\n')
    bench(server, capsys, "--requests", "3", "--concurrency", "1", "--prompts-file", str(file), "--output-len", "4")
    assert [body["prompt"] for body in server.asked] == ["one two", [5, 6, 7], "one two"]
    assert "/tokenize" not in server.paths
    said = refusal(capsys, "--url", server.url, "--endpoint", "chat", "--prompts-file", str(file))
    assert "chat takes no token ids" in said


def test_the_key_goes_with_every_request_and_is_never_written(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.is_locked = True
    monkeypatch.setenv("MY_KEY", KEY)
    report = bench(server, capsys, "--requests", "2", "--api-key-env", "MY_KEY")
    assert report["requests"]["succeeded"] == 2
    assert KEY not in json.dumps(report)
    said = refusal(capsys, "--url", server.url)
    assert "refuses the key" in said
    assert "invalid_api_key" in said
    monkeypatch.setenv("MY_KEY", "clé")
    assert "characters that no header takes" in refusal(capsys, "--url", server.url, "--api-key-env", "MY_KEY")


# When it sends


def test_so_many_clients_ask_at_once_and_never_more(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.hold = 6  # with fewer at once no answer would begin
    report = bench(server, capsys, "--requests", "20", "--concurrency", "6")
    assert server.most_running == 6
    assert report["requests"]["most_at_once"] == 6
    assert report["load"] == {"kind": "concurrency", "concurrency": 6}


def test_arrivals_at_a_rate_do_not_wait_for_answers(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.hold = 25  # answers begin when the last request is there
    report = bench(server, capsys, "--requests", "25", "--rate", "500")
    assert report["requests"]["succeeded"] == 25
    assert report["requests"]["most_at_once"] == 25


def test_a_trace_is_replayed_with_its_lengths(
    server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [f"2023-11-16 18:17:0{second}.0,{10 + second},{20 + second}\n" for second in range(4)]
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    flags = ("--trace", str(tmp_path / "trace.csv"), "--speed", "100", "--max-output-len", "22")
    report = bench(server, capsys, *flags)
    assert [(len(body["prompt"]), body["max_tokens"]) for body in server.asked] == [
        (10, 20),
        (11, 21),
        (12, 22),
        (13, 22),
    ]
    assert report["duration_s"] >= 0.03
    assert report["load"] == {"kind": "trace", "requests": 4, "speed": 100.0}


@pytest.mark.parametrize("load", [("--concurrency", "2"), ("--rate", "200")])
def test_after_the_seconds_no_new_request_is_sent_and_the_rest_is_waited_for(
    server: FakeServer, capsys: pytest.CaptureFixture[str], load: tuple[str, ...]
) -> None:
    report = bench(server, capsys, "--seconds", "0.2", *load)
    assert report["requests"]["sent"] == report["requests"]["succeeded"] > 0
    assert report["duration_s"] >= 0.1


def test_the_same_seed_sends_the_same_requests(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    sent = []
    for seed in ("1", "1", "2"):
        server.bodies.clear()
        bench(server, capsys, "--requests", "4", "--concurrency", "1", "--seed", seed, "--input-len", "uniform:2:30")
        sent.append([body["prompt"] for body in server.asked])
    assert sent[0] == sent[1] != sent[2]


# What goes wrong


def test_failures_are_counted_by_their_code_and_the_rest_goes_on(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.failures = {0: 429, 1: "event", 2: "cut", 3: "garbage", 4: 502, 6: 429}
    report = bench(server, capsys, "--requests", "10", "--concurrency", "1", code=1)
    counts = {code: error["count"] for code, error in report["errors"].items()}
    assert counts == {"code_429": 2, "command_failed": 1, "cut_off": 1, "bad_event": 1, "http_502": 1}
    assert report["errors"]["command_failed"]["message"] == "expert 3 failed"
    assert report["errors"]["http_502"]["message"] == "Bad Gateway"
    assert report["requests"] == {"sent": 10, "succeeded": 4, "failed": 6, "unfinished": 0, "most_at_once": 1}


def test_a_request_that_gets_nothing_for_too_long_fails(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.hold, server.holds_for_good = 2, True
    report = bench(server, capsys, "--requests", "2", "--concurrency", "2", "--timeout-s", "0.5", code=1)
    assert {code: error["count"] for code, error in report["errors"].items()} == {"timeout": 2}


def test_a_server_that_is_not_there_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer()) as server:
        url = server.url
    assert "cannot reach" in refusal(capsys, "--url", url)
    assert "connect_error" in refusal(capsys, "--url", url, "--model", "m", "--vocab-size", "9")


def test_a_server_that_refuses_every_request_is_one_error(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refused = ("model",)
    assert "field not supported: model" in refusal(capsys, "--url", server.url)
    assert server.asked == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "--url is missing"),
        (("--url", "localhost:8000"), "'localhost:8000' is no address"),
        (("--url", "http://h:0"), "is no address"),
        (("--url", "http://h:port"), "is no address"),
        (("--url", "http://h", "--rate", "1", "--concurrency", "2"), "--concurrency and --rate are given together"),
        (("--url", "http://h", "--speed", "2"), "--speed is given without --trace"),
        (("--url", "http://h", "--trace", "nowhere.csv"), "cannot read the trace nowhere.csv"),
        (("--url", "http://h", "--trace", "f", "--input-len", "3"), "--input-len is given, but --trace says it"),
        (
            ("--url", "http://h", "--prompts-file", "f", "--vocab-size", "3"),
            "--vocab-size is given, but --prompts-file",
        ),
        (("--url", "http://h", "--prompts-file", "f", "--trace", "g"), "--prompts-file and --trace are given together"),
        (("--url", "http://h", "--endpoint", "both"), "it must be chat or completions"),
        (("--url", "http://h", "--endpoint", "chat", "--vocab-size", "3"), "leave it out"),
        (("--url", "http://h", "--api-key-env", "NO_SUCH_VARIABLE"), "NO_SUCH_VARIABLE, which is not set"),
        (("--url", "http://h", "--input-len", "some"), "'some' is no length"),
        (("--url", "http://h", "--rate", "0"), "must be a number above 0"),
        (("--url", "http://h", "--concurrency", "0"), "must be an integer above 0"),
        (("--url", "http://h", "--seconds", "-1"), "must be a number of seconds above 0"),
    ],
)
def test_flags_that_are_wrong_or_say_two_things_are_refused(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, *flags)


def test_a_bench_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "WHAT" in capsys.readouterr().err


# What a person sees


def test_a_table_has_throughput_times_and_errors(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.failures = {1: 429}
    server.refused = ("ignore_eos",)
    assert main(["bench", "serve", "--url", server.url, "--requests", "4", "--output-len", "4"]) == 1
    out = capsys.readouterr().out
    for text in (
        "3 succeeded, 1 failed; 4 at once at most",
        "1 x code_429: no, 429",
        "output tokens/s",
        "time to first token",
        "p99",
    ):
        assert text in out
    assert "note: ignore_eos is refused" in out


def test_a_client_that_is_the_limit_says_so(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "is_bottleneck", lambda lag_p99_s, cpu_share: True)
    assert main(["bench", "serve", "--url", server.url, "--requests", "2"]) == 0
    assert "warning: these figures may be this client's more than the server's: it took" in capsys.readouterr().out


def test_an_interrupt_writes_what_was_seen_and_ends_as_interrupted(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.hold, server.holds_for_good = 3, True
    sender = threading.Thread(target=_interrupt_when, args=(server.held,))
    sender.start()
    report = bench(server, capsys, "--requests", "9", "--concurrency", "3", code=130)
    sender.join()
    assert report["interrupted"]
    assert report["requests"] == {"sent": 3, "succeeded": 0, "failed": 0, "unfinished": 3, "most_at_once": 3}


def test_without_a_terminal_there_is_a_line_now_and_then(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bar, "LINE_EVERY_S", 0.001)
    assert main(["bench", "serve", "--url", server.url, "--requests", "40"]) == 0
    assert " of 40 requests, " in capsys.readouterr().err


def test_on_a_terminal_there_is_a_bar(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bar, "REFRESH_S", 0.001)
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["bench", "serve", "--url", server.url, "--requests", "40"]) == 0
    assert "of 40 requests" in capsys.readouterr().err


def _interrupt_when(event: threading.Event) -> None:
    if event.wait(60):
        os.kill(os.getpid(), signal.SIGINT)
