# SPDX-License-Identifier: MIT OR Apache-2.0
"""What HTTP costs: the bare engine, `metrale-ray serve` and Ray Serve on one checkpoint, in one run.

    python -m bench.serve [--clients 1,8,32,64] [--prompt 128] [--new 64] [--reps 3] [--ep-size 2]
                          [--cases bare,serve,ray]

Each case starts an engine of its own and is asked by so many clients at a time, each again as soon as it has its
answer, `--rounds` requests for each client. Tokens per second count from the first request to the last answer. `bare`:
token ids by a front's session, no text and no HTTP. `serve` and `ray`: streams by `metrale-ray bench serve`, from a
process of its own, which takes its part of the machine too. An empty Ray Serve handler, asked by one client, is what
the proxy costs.

Printed: medians over the repeats; ratios to `bare`; how much later the first token comes (p50); the CPU seconds of the
processes in front of the engine for 1,000 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.load import OtherLoad
from bench.model import ensure_model, ensure_tokenizer

VOCAB_SIZE = 32_000
START_S = 600.0
CASES = ("bare", "serve", "ray")
FRONTS = {"serve": ("-m metrale_ray serve",), "ray": ("ServeReplica:bench:Front", "ProxyActor")}
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    args = _arguments()
    if args.case == "bare":
        print(json.dumps(_bare(args, ensure_model(args.model))))
        return
    if args.case == "ray":
        _serve_on_ray(args, ensure_model(args.model))
        return
    args.model = ensure_tokenizer(ensure_model(args.model))
    found = {case: _measured(args, case) for case in args.cases}
    _table(args, found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--clients", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32, 64])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--ep-size", type=int, default=2)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    return parser.parse_args()


def _settings(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "ep_size": args.ep_size,
        "max_model_len": max(512, args.prompt + args.new + 16),
        "max_batch_size": max(32, *args.clients),
        "kv_cache_memory": "1GiB",
    }


def _measured(args: argparse.Namespace, case: str) -> dict[int, list[dict[str, Any]]]:
    """By number of clients: one entry for each repeat. The empty handler's latency is at 0."""
    print(f"{case} ...", file=sys.stderr, flush=True)
    if case == "bare":
        done = subprocess.run(_again(args, "bare"), stdout=subprocess.PIPE, check=True, env=_environment())
        return {int(n): reps for n, reps in json.loads(done.stdout.splitlines()[-1]).items()}
    with _service(args, case) as url:
        found: dict[int, list[dict[str, Any]]] = {}
        if case == "ray":
            found[0] = [{"ttft_ms": _empty_ms(url.removesuffix("/m") + "/empty")}]
        _drive(args, url, 1, rounds=1)  # the first of everything
        for num_clients in args.clients:
            found[num_clients] = [_counted(args, case, url, num_clients) for _ in range(args.reps)]
        return found


def _again(args: argparse.Namespace, case: str, port: int = 0) -> list[str]:
    command = [sys.executable, "-m", "bench.serve", "--case", case, "--port", str(port), "--model", str(args.model)]
    for name in ("prompt", "new", "rounds", "reps", "ep_size"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    return [*command, "--clients", ",".join(map(str, args.clients))]


def _environment() -> dict[str, str]:
    return {**os.environ, "BENCH_ROOT_PID": str(os.getpid())}


def _prompts(args: argparse.Namespace, count: int) -> list[list[int]]:
    """The same for every case: which experts are read depends on the tokens."""
    chance = random.Random(count)
    return [[chance.randrange(10, VOCAB_SIZE) for _ in range(args.prompt)] for _ in range(count)]


# The bare engine --------------------------------------------------------------------------------------------------


def _bare(args: argparse.Namespace, model: Path) -> dict[int, list[dict[str, Any]]]:
    from metrale_ray.cluster import Cluster
    from metrale_ray.config import from_mapping
    from metrale_ray.protocol.front import FrontClient

    cluster = Cluster(from_mapping(_settings(args, model)).resolved())
    cluster.start(lambda state: None)
    client = FrontClient(cluster.front_address, cluster.front_keys, cluster.head_key)
    try:
        client.wait_opened(30)
        asyncio.run(_ask_all(args, client, 1, rounds=1))
        return {n: [_bare_rep(args, client, n) for _ in range(args.reps)] for n in args.clients}
    finally:
        client.close()
        cluster.close()


def _bare_rep(args: argparse.Namespace, client: Any, num_clients: int) -> dict[str, Any]:
    with OtherLoad() as load:
        found = asyncio.run(_ask_all(args, client, num_clients, args.rounds))
    _say("bare", num_clients, found)
    return {**found, "others": load.cores}


async def _ask_all(args: argparse.Namespace, client: Any, num_clients: int, rounds: int) -> dict[str, Any]:
    from metrale_ray.sampling.token_params import TokenParams

    params = TokenParams(max_tokens=args.new, temperature=0.0, ignore_eos=True)
    prompts = iter(_prompts(args, num_clients * rounds))
    firsts_s: list[float] = []
    gaps_s: list[float] = []

    async def one_client() -> None:
        for _ in range(rounds):
            prompt = next(prompts)
            sent_s = last_s = time.perf_counter()
            handle, is_first = client.submit(prompt, params), True
            while True:
                output = await handle.aget()
                now_s = time.perf_counter()
                (firsts_s if is_first else gaps_s).append(now_s - (sent_s if is_first else last_s))
                last_s, is_first = now_s, False
                if output.finish_reason is not None:
                    assert output.finish_reason == "length", output
                    break

    began_s = time.perf_counter()
    await asyncio.gather(*(one_client() for _ in range(num_clients)))
    took_s = time.perf_counter() - began_s
    return {
        "tokens_per_s": num_clients * rounds * args.new / took_s,
        "ttft_ms": 1000 * statistics.median(firsts_s),
        "itl_ms": 1000 * statistics.median(gaps_s),
        "itl_p99_ms": 1000 * statistics.quantiles(gaps_s, n=100)[98],
    }


# A service ----------------------------------------------------------------------------------------------------------


@contextmanager
def _service(args: argparse.Namespace, case: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    if case == "serve":
        settings = [f"--{name.replace('_', '-')}={value}" for name, value in _settings(args, args.model).items()]
        command = [sys.executable, "-m", "metrale_ray", "serve", *settings, f"--port={port}", "--log-level=error"]
        url = f"http://127.0.0.1:{port}"
    else:
        command, url = _again(args, "ray", port), f"http://127.0.0.1:{port}/m"
    service = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=_environment())
    try:
        _wait_ready(f"{url}/health/ready", service)
        yield url
    finally:
        service.send_signal(signal.SIGTERM)
        try:
            service.wait(120)
        finally:
            service.kill()


def _wait_ready(url: str, service: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if service.poll() is not None:
            raise SystemExit(f"the service ended with code {service.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"{url} was not ready within {START_S:g} s")


def _serve_on_ray(args: argparse.Namespace, model: Path) -> None:
    """Serve until SIGTERM; the empty handler beside it."""
    import ray
    from ray import serve

    from metrale_ray.serve.deployment import build_app

    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Empty:
        async def __call__(self) -> str:
            return ""

    def end(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=max(2, args.ep_size))
    signal.signal(signal.SIGTERM, end)
    try:
        serve.start(http_options={"port": args.port})
        serve.run(Empty.bind(), name="empty", route_prefix="/empty")
        serve.run(build_app(_settings(args, model)), name="bench", route_prefix="/m")
        signal.pause()
    except KeyboardInterrupt:
        serve.shutdown()
        ray.shutdown()


def _counted(args: argparse.Namespace, case: str, url: str, num_clients: int) -> dict[str, Any]:
    pids = _pids(FRONTS[case])
    before_s = _cpu_s(pids)
    with OtherLoad() as load:
        found = _drive(args, url, num_clients, args.rounds)
    found["cpu_s"] = 1000 * (_cpu_s(pids) - before_s) / (num_clients * args.rounds * args.new)
    _say(case, num_clients, found)
    return {**found, "others": load.cores}


def _drive(args: argparse.Namespace, url: str, num_clients: int, rounds: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "metrale_ray", "bench", "serve", "--url", url, "--json"]
    command += ["--concurrency", str(num_clients), "--requests", str(num_clients * rounds), "--temperature", "0"]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        lines = [json.dumps({"prompt_token_ids": prompt}) for prompt in _prompts(args, num_clients * rounds)]
        file.write("\n".join(lines) + "\n")
        file.flush()
        command += ["--prompts-file", file.name, "--output-len", str(args.new)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=_environment())
    report = json.loads(done.stdout)
    assert report["tokens"]["output"] == num_clients * rounds * args.new, report
    return {
        "tokens_per_s": report["throughput"]["output_tokens_per_s"],
        "ttft_ms": report["time_to_first_token_ms"]["p50"],
        "itl_ms": report["inter_token_ms"]["p50"],
        "itl_p99_ms": report["inter_token_ms"]["p99"],
    }


def _empty_ms(url: str) -> float:
    """p50 of one client that asks again and again, over one connection."""
    import http.client

    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=60)
    times_ms = []
    for _ in range(300):
        began_s = time.perf_counter()
        connection.request("GET", f"/{path}")
        connection.getresponse().read()
        times_ms.append(1000 * (time.perf_counter() - began_s))
    return statistics.median(times_ms[50:])


def _pids(names: tuple[str, ...]) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue  # it ended meanwhile
            if any(name in command for name in names) and "bench.serve" not in command:
                found.append(int(folder.name))
    return found


def _cpu_s(pids: list[int]) -> float:
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / CLOCK_TICKS


# The table ----------------------------------------------------------------------------------------------------------


def _say(case: str, num_clients: int, found: dict[str, Any]) -> None:
    print(f"  {case}, {num_clients} clients: {found['tokens_per_s']:.1f} tokens/s", file=sys.stderr, flush=True)


def _table(args: argparse.Namespace, found: dict[str, dict[int, list[dict[str, Any]]]]) -> None:
    def median(case: str, num_clients: int, name: str) -> float | None:
        values = [each[name] for each in found.get(case, {}).get(num_clients, ()) if name in each]
        return statistics.median(values) if values else None

    print(f"{args.prompt} prompt tokens, {args.new} new ones, {args.ep_size} ranks, {args.reps} repeats\n")
    print(
        "| clients | case | tokens/s | of bare | TTFT p50 ms | later by | ITL p50 / p99 ms | CPU s / 1,000 | others |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for num_clients in args.clients:
        for case in found:
            row = {name: median(case, num_clients, name) for name in ("tokens_per_s", "ttft_ms", "itl_ms")}
            bare = {name: median("bare", num_clients, name) for name in ("tokens_per_s", "ttft_ms")}
            cells = (
                str(num_clients),
                case,
                _shown(row["tokens_per_s"]),
                _shown(_over(row["tokens_per_s"], bare["tokens_per_s"]), 2),
                _shown(row["ttft_ms"]),
                _shown(_less(row["ttft_ms"], bare["ttft_ms"])),
                f"{_shown(row['itl_ms'])} / {_shown(median(case, num_clients, 'itl_p99_ms'))}",
                _shown(median(case, num_clients, "cpu_s"), 2),
                _shown(median(case, num_clients, "others"), 2),
            )
            print("| " + " | ".join(cells) + " |")
    empty = median("ray", 0, "ttft_ms")
    if empty is not None:
        print(f"\nan empty Ray Serve handler, one client: p50 {empty:.1f} ms")


def _over(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _less(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value - base


def _shown(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
