# SPDX-License-Identifier: MIT OR Apache-2.0
"""`metrale-ray bench serve`: load for a server that speaks OpenAI's API, and what was measured, as a table or as JSON.

Rules. Exit code 0, 1 where a request failed. An interrupt ends the run, and what was seen until then is written.

The JSON's keys: `url`, `model`, `endpoint`, `load` (its `kind` and numbers), `seed`, `notes` (what the server does not
take), and those of `traffic.report`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from metrale_ray.cli_output import console, write_object
from metrale_ray.cli_prompts import Prompt, read_prompts
from metrale_ray.errors import UserError

if TYPE_CHECKING:
    from metrale_ray.traffic.arrivals import Arrivals
    from metrale_ray.traffic.drive import Run
    from metrale_ray.traffic.questions import Plan
    from metrale_ray.traffic.session import Session

ALL_WELL, REQUEST_FAILED = 0, 1
DEFAULT_CLIENTS, DEFAULT_REQUESTS, DEFAULT_LENGTH = 8, 100, "128"
DEFAULT_TIMEOUT_S = 600.0
LOADS = ("concurrency", "rate", "trace")
TIMES = {
    "time_to_first_token_ms": "time to first token",
    "inter_token_ms": "between tokens",
    "per_output_token_ms": "per output token",
    "end_to_end_ms": "end to end",
}


def bench_serve(given: Mapping[str, Any], environment: Mapping[str, str], answers: TextIO) -> int:
    """Send the load, write the report, and give the exit code. Raises UserError; after an interrupt's report, that."""
    if importlib.util.find_spec("aiohttp") is None:
        raise UserError("bench serve needs aiohttp; install it: pip install 'metrale-ray[serve]'")
    _check_together(given)
    plan, prompts = _plan(given), _prompts(given)
    bench = _Bench(given, plan, prompts, _headers(given, environment))
    try:
        with asyncio.Runner() as runner:
            runner.run(bench.go())
    except KeyboardInterrupt:
        if bench.run is not None and bench.run.samples:
            _write(answers, bench.report(is_interrupted=True), as_json=bool(given.get("json")))
        raise
    report = bench.report(is_interrupted=False)
    _write(answers, report, as_json=bool(given.get("json")))
    return REQUEST_FAILED if report["requests"]["failed"] else ALL_WELL


class _Bench:
    """One command: what was asked for, and, once it has begun, its run."""

    def __init__(
        self, given: Mapping[str, Any], plan: Plan, prompts: list[Prompt] | None, headers: dict[str, str]
    ) -> None:
        from metrale_ray.traffic.server import read_url

        self.run: Run | None = None
        self._given = given
        self._plan = plan
        self._prompts = prompts
        self._headers = headers
        self._url = read_url(given["url"])
        self._about: dict[str, Any] = {}

    async def go(self) -> None:
        """Ask the server what it takes, then send everything."""
        from metrale_ray.traffic.session import open_session

        async with open_session(self._headers, self._given.get("timeout_s", DEFAULT_TIMEOUT_S)) as client:
            self.run = await self._prepare(client)
            await _drive_shown(self.run, client, self._plan.num_requests, self._given.get("seconds"))

    async def _prepare(self, client: Session) -> Run:
        from metrale_ray.traffic.dialect import Dialect
        from metrale_ray.traffic.drive import Run
        from metrale_ray.traffic.server import Server
        from metrale_ray.traffic.words import Given, PromptMaker

        server, endpoint = Server(client, self._url), self._given.get("endpoint", "completions")
        model = self._given.get("model") or await server.first_model()
        maker: PromptMaker = Given(self._prompts or ())
        if self._prompts is None:
            maker = await server.prompt_maker(model, endpoint, self._given.get("vocab_size"))
        ignore_eos = not self._given.get("stop_at_eos")
        form = Dialect(model, endpoint, ignore_eos=ignore_eos, temperature=self._given.get("temperature"))
        dialect, maker, notes = await server.learn(form, maker)
        load = self._plan.arrivals.describe()
        self._about = {"url": self._url, "model": model, "endpoint": endpoint, "load": load, "seed": self._plan.seed}
        self._about["notes"] = notes
        return Run(self._plan, dialect, maker, server.address(dialect.path), self._given.get("seconds"))

    def report(self, *, is_interrupted: bool) -> dict[str, Any]:
        """What was measured."""
        from metrale_ray.traffic.report import make_report

        assert self.run is not None
        return {**self._about, **make_report(self.run, is_interrupted=is_interrupted)}


async def _drive_shown(run: Run, client: Session, num_requests: int | None, seconds: float | None) -> None:
    from metrale_ray.traffic.bar import show

    shown = asyncio.ensure_future(show(run, num_requests=num_requests, seconds=seconds))
    try:
        await run.drive(client)
    finally:
        shown.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await shown


def _headers(given: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
    name = given.get("api_key_env")
    if name is None:
        return headers
    key = environment.get(name, "").strip()
    if not key:
        raise UserError(f"--api-key-env names {name}, which is not set; put the key into it")
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"the key in {name} has characters that no header takes; check what the variable holds")
    return {**headers, "Authorization": f"Bearer {key}"}


def _check_together(given: Mapping[str, Any]) -> None:
    """Refuse flags that are missing or say two things. Raises UserError."""
    if "url" not in given:
        raise UserError("--url is missing; give the server, such as --url http://127.0.0.1:8000")
    loads = [name for name in LOADS if name in given]
    if "trace" in given and "prompts_file" in given:
        raise UserError("--prompts-file and --trace are given together; prompts of a file have lengths of their own")
    if len(loads) > 1:
        raise UserError(f"--{' and --'.join(loads)} are given together; use one of --{', --'.join(LOADS)}")
    if "speed" in given and "trace" not in given:
        raise UserError("--speed is given without --trace, whose times it changes")
    source = next((name for name in ("trace", "prompts_file") if name in given), None)
    lengths = [name for name in ("input_len", "output_len", "vocab_size") if name in given and _is_told(name, given)]
    if lengths:
        raise UserError(
            f"{_flag(lengths[0])} is given, but {_flag(source or '')} says it already; leave one of them out"
        )
    if given.get("endpoint", "chat") not in ("chat", "completions"):
        raise UserError(f"--endpoint is {given['endpoint']!r}; it must be chat or completions")
    if "vocab_size" in given and given.get("endpoint") == "chat":
        raise UserError("--vocab-size makes prompts of token ids, which chat does not take; leave it out")


def _is_told(name: str, given: Mapping[str, Any]) -> bool:
    """Whether a file says already what the flag `name` says."""
    by_trace = "trace" in given and name in ("input_len", "output_len")
    return by_trace or ("prompts_file" in given and name in ("input_len", "vocab_size"))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _prompts(given: Mapping[str, Any]) -> list[Prompt] | None:
    if "prompts_file" not in given:
        return None
    prompts = read_prompts(given)
    if given.get("endpoint") == "chat" and not all(isinstance(prompt, str) for prompt in prompts):
        raise UserError(f"{given['prompts_file']} has prompts of token ids, and chat takes no token ids; give texts")
    return prompts


def _plan(given: Mapping[str, Any]) -> Plan:
    from metrale_ray.traffic.lengths import read_lengths
    from metrale_ray.traffic.questions import Plan

    default = None if "seconds" in given or "trace" in given else DEFAULT_REQUESTS
    return Plan(
        _arrivals(given),
        read_lengths(given.get("input_len", DEFAULT_LENGTH)),
        read_lengths(given.get("output_len", DEFAULT_LENGTH)),
        seed=given.get("seed", 0),
        num_requests=given.get("requests", default),
        max_input=given.get("max_input_len"),
        max_output=given.get("max_output_len"),
    )


def _arrivals(given: Mapping[str, Any]) -> Arrivals:
    from metrale_ray.traffic.arrivals import Closed, Rate, Recorded
    from metrale_ray.traffic.trace import read_trace

    if "rate" in given:
        return Rate(given["rate"])
    if "trace" in given:
        return Recorded(read_trace(given["trace"]), given.get("speed", 1.0))
    return Closed(given.get("concurrency", DEFAULT_CLIENTS))


def _write(answers: TextIO, report: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        write_object(answers, report)
        return
    from rich.table import Table

    shown = console(answers)
    facts = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _facts(report):
        facts.add_row(name, value)
    shown.print(facts)
    times = Table(box=None, pad_edge=False)
    times.add_column("milliseconds")
    for column in ("mean", "p50", "p90", "p99", "max"):
        times.add_column(column, justify="right")
    for key, name in TIMES.items():
        times.add_row(name, *("-" if value is None else f"{value:.1f}" for value in report[key].values()))
    shown.print(times)
    for line in _warnings(report):
        shown.print(line)
    answers.flush()


def _facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    requests, tokens, rates = report["requests"], report["tokens"], report["throughput"]
    unfinished = f", {requests['unfinished']} unfinished" if requests["unfinished"] else ""
    load = ", ".join(f"{name} {value:g}" for name, value in report["load"].items() if name != "kind")
    yield "server", f"{report['url']}, {report['endpoint']} of {report['model']}"
    yield "load", load if report["load"]["kind"] != "trace" else f"trace, {load}"
    yield "duration", f"{report['duration_s']:.2f} s"
    ended = f"{requests['succeeded']} succeeded, {requests['failed']} failed{unfinished}"
    yield "requests", f"{ended}; {requests['most_at_once']} at once at most"
    for code, error in report["errors"].items():
        yield "error", f"{error['count']} x {code}: {error['message']}"
    yield "tokens", f"{tokens['input']} in, {tokens['output']} out (counted by {tokens['counted_by']})"
    yield (
        "throughput",
        (
            f"{rates['requests_per_s']:.3f} requests/s, {rates['input_tokens_per_s']:.1f} input tokens/s, "
            f"{rates['output_tokens_per_s']:.1f} output tokens/s"
        ),
    )


def _warnings(report: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"note: {note}" for note in report["notes"])
    client = report["client"]
    if client["is_bottleneck"]:
        share, late_ms = client["cpu_share"], client["lag_ms"]["p99"] or 0.0
        yield (
            f"warning: these figures may be this client's more than the server's: it took {share:.0%} of a core, and "
            f"its loop was {late_ms:.0f} ms late (p99), as on a machine that others keep busy; run it elsewhere, or "
            "with less load"
        )
    if report["interrupted"]:
        yield "interrupted: the figures are of what had ended until then"
