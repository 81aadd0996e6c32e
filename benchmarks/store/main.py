"""How close is the store to the server's own limit, and how far ahead of redis-py's best call?

    python -m benchmarks.store.main [--url URL] [--rows 10000] [--row-bytes 256] [--buckets 64] [--pin] [--out DIR]

Every round times each of these once, in a new order, on one server (a private embedded one unless --url is given):

    ours      RedisStore.read / write of one batch of random ids, with row checksums
    fenced    the same write by a writer with a fencing token, as in a job: guarded, logged, written once
    plain     the same write without fence and checksums: HSETs of the rows only, by the same client
    replay    the bytes that `ours` sends, encoded in advance, on a raw socket; replies are read and dropped
    tfra      with --tfra PYTHON: RedisTable of tensorflow-recommenders-addons (C++), which that python has; it needs
              --url redis://HOST:PORT, because its client has no unix sockets
    redis-py  MGET/MSET on keys, HMGET/HSET on one hash, HMGET/HSET per bucket in a pipeline; arguments prepared in
              advance, replies left as lists of bytes; parser: hiredis. Only the fastest of a first pass takes part

Reported: medians over rounds, ratios of rates, and the cost of safety (fenced / plain and fenced / ours, in time; logs
are closed and removed every 20 rounds, as by checkpoints). The batch holds rows of --tables tables in equal shares.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import redis

from bagpipe.errors import InputError
from bagpipe.store.server.embedded import EmbeddedServer
from benchmarks.harness.benchmark import Benchmark, Measure, Part, Values, run_benchmark
from benchmarks.harness.report import table
from benchmarks.harness.rounds import medians
from benchmarks.store.contestants import TFRA, Workload, measure


def summarise(seconds: Mapping[str, Sequence[float]], num_rows: int) -> dict[str, Any]:
    """Medians in milliseconds and rates of one operation, and the ratios that matter."""
    times_s = medians(seconds)
    best = min((name for name in times_s if name.startswith("redis-py")), key=times_s.__getitem__)
    summary: dict[str, Any] = {
        "median_ms": {name: round(value * 1e3, 3) for name, value in times_s.items()},
        "million_rows_per_s": {name: round(num_rows / value / 1e6, 3) for name, value in times_s.items()},
        "ours_over_replay": round(times_s["replay"] / times_s["ours"], 3),
        "ours_over_redis_py": round(times_s[best] / times_s["ours"], 3),
        "best_redis_py": best,
    }
    if TFRA in times_s:
        summary["ours_over_tfra"] = round(times_s[TFRA] / times_s["ours"], 3)
    if "fenced" in times_s:
        for name in ("ours", "plain"):
            summary[f"fenced_over_{name}"] = round(times_s["fenced"] / times_s[name], 3)
    return summary


@contextlib.contextmanager
def _server(options: argparse.Namespace, *, pin: bool = False) -> Iterator[str]:
    """URL of the server to measure."""
    if options.url:
        yield options.url
        return
    with (
        tempfile.TemporaryDirectory(prefix="bagpipe-bench-") as folder,
        EmbeddedServer(folder, binary=options.server) as server,
    ):
        if pin:
            _pin(server.process_id)
        yield server.url


def _pin(server_process_id: int) -> None:
    """Give the server and this process one CPU each; otherwise the scheduler can put both on the same one."""
    client_cpu, server_cpu = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(server_process_id, {server_cpu})
    os.sched_setaffinity(0, {client_cpu})


def _version(url: str) -> str:
    with contextlib.closing(redis.Redis.from_url(url)) as client:
        info = client.info("server")
    return f"{info.get('server_name', 'redis')} {info.get('valkey_version', info['redis_version'])}"


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    """One part per server and setting. It is named after both, so they are published side by side."""
    if options.tfra and not options.url.startswith("redis://"):
        raise InputError(f"--tfra needs --url redis://HOST:PORT, got {options.url!r}")
    with _server(options) as url:
        server = _version(url)
    name = (
        f"{server}, {options.rows:,} rows of {options.row_bytes} B, {options.tables} tables, {options.buckets} buckets"
    )
    return {name + ("" if options.pin else ", not pinned"): partial(_measure, options, server)}


def _measure(options: argparse.Namespace, server: str, part: Part) -> None:
    work = Workload(
        num_rows=options.rows, row_bytes=options.row_bytes, num_tables=options.tables, num_buckets=options.buckets
    )
    with _server(options, pin=options.pin) as url:
        seconds = measure(url, work, options.repeats, options.tfra)
    setting = {name: getattr(options, name) for name in ("rows", "row_bytes", "tables", "buckets", "repeats")}
    part.keep(
        {
            "server": server,
            **setting,
            "pinned": options.pin,
            "results": {kind: summarise(of, options.rows) for kind, of in seconds.items()},
        }
    )


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="", help="one server; default: a private embedded one")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--row-bytes", type=int, default=256)
    parser.add_argument("--tables", type=int, default=1)
    parser.add_argument("--buckets", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--server", type=Path, help="binary of the embedded server; default: found on PATH")
    parser.add_argument("--tfra", type=Path, metavar="PYTHON", help="with tensorflow-recommenders-addons: takes part")
    parser.add_argument("--pin", action="store_true", help="one CPU for the embedded server, another for the client")


def _tables(values: Values) -> str:
    headers = ("server", "setting", "operation", "redis-py's best", "replay", "tfra", "plain", "ours", "fenced")
    rows = [
        _row(found, operation)
        for part in values["parts"].values()
        if (found := part.get("found"))
        for operation in ("write", "read")
    ]
    return table((*headers, "fenced / plain", "ours / replay", "ours / redis-py", "ours / tfra"), rows)


_RATIOS = ("fenced_over_plain", "ours_over_replay", "ours_over_redis_py", "ours_over_tfra")


def _row(found: Mapping[str, Any], operation: str) -> tuple[object, ...]:
    result = found["results"][operation]
    setting = f"{found['rows']:,} x {found['row_bytes']} B, tables {found['tables']}, buckets {found['buckets']}"
    times = (
        result["median_ms"].get(name) for name in (result["best_redis_py"], "replay", TFRA, "plain", "ours", "fenced")
    )
    ratios = (result.get(name) for name in _RATIOS)
    return (
        found["server"],
        setting + ("" if found["pinned"] else ", not pinned"),
        operation,
        *(None if value is None else f"{value:.2f}" for value in (*times, *ratios)),
    )


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=_tables,
    rehearsal={"rows": 500, "repeats": 5},
    packages=("numpy", "redis", "hiredis"),
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
