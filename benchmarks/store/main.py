"""How close is the store to the server's own limit, and how far ahead of redis-py's best call?

    python -m benchmarks.store.main [--url URL] [--rows 10000] [--row-bytes 256] [--buckets 64] [--pin] [--json F]

Every round times each of these once, in a new order, on one server (a private embedded one unless --url is given):

    ours      RedisStore.read / write of one batch of random ids, with their check words
    fenced    the same write by a writer with a fence, as a job's: guarded, logged, written once
    plain     the same write without fence and check words: HSETs of the rows and nothing else, by the same client
    replay    the very bytes `ours` sends, made beforehand, sent on a raw socket; the replies are read and thrown away
    redis-py  MGET/MSET on keys, HMGET/HSET on one hash, HMGET/HSET per bucket in a pipeline; arguments made beforehand,
              replies left as lists of bytes; parser: hiredis. The fastest, found in a first pass, takes part

Reported: the median over rounds, the ratios of rates, and what safety costs (fenced / plain and fenced / ours, in time;
logs are closed and removed every 20 rounds, as by checkpoints). The batch holds rows of --tables tables in equal
shares. A job's groups are smaller: see --rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import redis
from numpy.typing import NDArray

from bagpipe.store.fencing.fence import Fence, Ledger
from bagpipe.store.interface import WriteRequest
from bagpipe.store.keys import bucket_key
from bagpipe.store.redis.resp_rows import FieldEncoder, HmgetDecoder, RowEncoder, hmget_header, hset_header
from bagpipe.store.redis.routing import Router, servers_of_buckets
from bagpipe.store.redis.row_checksum import value_dtype
from bagpipe.store.redis.row_codecs import max_command_rows
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.schema import RowSchema, RowTable
from benchmarks.store.plain import PlainWriter

NAMESPACE = "bench"
FENCED_NAMESPACE = "bench-fenced"
Requests = list[tuple[int, NDArray[np.int64]]]


class Workload:
    """One batch: ids and rows of every table, and the bytes and arguments made from them beforehand."""

    def __init__(self, options: argparse.Namespace) -> None:
        rng = np.random.default_rng(7)
        self.num_rows, self.row_bytes, self.num_buckets = options.rows, options.row_bytes, options.buckets
        dim = self.row_bytes // 4
        self.schema = RowSchema(
            tables=tuple(RowTable(name=f"t{number}", dim=dim) for number in range(options.tables)), optimizer="sgd"
        )
        shares = np.array_split(np.arange(self.num_rows), options.tables)
        self.reads: Requests = [
            (table, np.sort(rng.choice(1 << 40, len(share), replace=False))) for table, share in enumerate(shares)
        ]
        self.rows = rng.random((self.num_rows, dim), np.float32)
        self.writes = [
            WriteRequest(table, ids, self.rows[share])
            for (table, ids), share in zip(self.reads, map(_as_slice, shares), strict=True)
        ]
        router = Router(servers_of_buckets(self.num_buckets, 1))
        routed = router.route(self.reads)
        self.order = routed.order
        self.sent_tables, self.sent_ids = routed.tables[routed.order], routed.ids[routed.order]
        self.commands = [
            (bucket_key(NAMESPACE, command.bucket), command.start, command.stop)
            for command in router.commands(routed, 0, max_rows=max_command_rows(self.row_bytes))
        ]

    def encoded_read(self) -> bytes:
        """The batch's HMGET requests."""
        encoder = FieldEncoder()
        data = encoder.encode(self.sent_tables, self.sent_ids).reshape(self.num_rows, -1)
        return b"".join(
            hmget_header(key, stop - start) + data[start:stop].tobytes() for key, start, stop in self.commands
        )

    def encoded_write(self) -> bytes:
        """The batch's HSET requests."""
        rows = self.rows.view(f"V{self.row_bytes}").reshape(-1)
        data = RowEncoder(self.row_bytes).encode(self.sent_tables, self.sent_ids, rows[self.order])
        data = data.reshape(self.num_rows, -1)
        return b"".join(
            hset_header(key, stop - start) + data[start:stop].tobytes() for key, start, stop in self.commands
        )

    def read_reply_bytes(self) -> int:
        """Bytes of the replies to `encoded_read` when every row is found."""
        decoder = HmgetDecoder(value_dtype(self.row_bytes))
        return sum(decoder.max_reply_bytes(stop - start) for _, start, stop in self.commands)

    def write_reply_bytes(self) -> int:
        """Bytes of the replies to `encoded_write` when every row exists: `:0 CR LF` a command."""
        return 4 * len(self.commands)


def _as_slice(share: NDArray[np.int64]) -> slice:
    return slice(int(share[0]), int(share[-1]) + 1)


def replay(sock: socket.socket, request: bytes, reply_bytes: int, buffer: memoryview) -> Callable[[], None]:
    """A function that sends `request` and reads `reply_bytes` bytes, nothing else."""

    def run() -> None:
        sock.sendall(request)
        left = reply_bytes
        while left:
            left -= sock.recv_into(buffer, min(left, len(buffer)))

    return run


def redis_py_calls(client: redis.Redis, work: Workload) -> dict[str, dict[str, Callable[[], Any]]]:
    """redis-py's calls for the same rows, arguments made beforehand."""
    fields = np.empty(work.num_rows, [("table", ">u4"), ("id", ">i8")])
    fields["table"], fields["id"] = work.sent_tables, work.sent_ids
    names = [field.tobytes() for field in fields]
    rows = [row.tobytes() for row in work.rows[work.order]]
    keys = [b"bench-key:" + name for name in names]
    by_key, by_field = dict(zip(keys, rows, strict=True)), dict(zip(names, rows, strict=True))
    parts = [
        (b"bench-py:" + key, names[start:stop], dict(zip(names[start:stop], rows[start:stop], strict=True)))
        for key, start, stop in work.commands
    ]

    def pipelined(call: Callable[[Any, bytes, list[bytes], dict[bytes, bytes]], Any]) -> Callable[[], Any]:
        def run() -> Any:
            pipeline = client.pipeline(transaction=False)
            for part in parts:
                call(pipeline, *part)
            return pipeline.execute()

        return run

    return {
        "write": {
            "redis-py MSET": lambda: client.mset(by_key),
            "redis-py HSET, one hash": lambda: client.hset("bench-hash", mapping=by_field),
            "redis-py HSET, pipelined": pipelined(lambda pipe, key, _, mapping: pipe.hset(key, mapping=mapping)),
        },
        "read": {
            "redis-py MGET": lambda: client.mget(keys),
            "redis-py HMGET, one hash": lambda: client.hmget("bench-hash", names),
            "redis-py HMGET, pipelined": pipelined(lambda pipe, key, part, _: pipe.hmget(key, part)),
        },
    }


def measure(url: str, work: Workload, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every round of every contender, per operation."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(
            RedisStore(url, schema=work.schema, namespace=NAMESPACE, num_buckets=work.num_buckets)
        )
        store.claim()
        fenced = stack.enter_context(
            RedisStore(url, schema=work.schema, namespace=FENCED_NAMESPACE, num_buckets=work.num_buckets)
        )
        plain = stack.enter_context(PlainWriter(url, work.writes, work.num_buckets))
        writer = FencedWriter(fenced, stack.enter_context(fenced.ledger()))
        raw = stack.enter_context(_connect(url))
        client = redis.Redis.from_url(url)
        stack.callback(client.close)
        buffer = memoryview(bytearray(1 << 20))
        contenders = _best_of_each(redis_py_calls(client, work))
        contenders["write"] |= {
            "ours": lambda: store.write_many(work.writes),
            "fenced": lambda: fenced.write_many(work.writes),
            "plain": plain.write,
            "replay": replay(raw, work.encoded_write(), work.write_reply_bytes(), buffer),
        }
        contenders["read"] |= {
            "ours": lambda: store.read_many(work.reads),
            "replay": replay(raw, work.encoded_read(), work.read_reply_bytes(), buffer),
        }
        contenders["write"]["ours"]()
        results = store.read_many(work.reads)
        assert all(result.found.all() for result in results)
        assert (np.concatenate([result.rows for result in results]) == work.rows).all()
        return _rounds(contenders, repeats, between=writer.checkpoint)


class FencedWriter:
    """A writer with a fence, and what keeps its logs short."""

    def __init__(self, store: RedisStore, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger
        token = f"1-{uuid.uuid4().hex}"
        ledger.acquire(token)
        ledger.begin("bench:0", 1)
        self._epoch = 1
        store.fence(Fence(token=token, writer=0, epoch=self._epoch))

    def checkpoint(self) -> None:
        """Begin new logs and remove the old ones, as a checkpoint does."""
        num_groups = self._store.rotate().tolist()
        self._ledger.commit(f"bench:{self._epoch}", self._epoch, [num_groups])
        self._epoch += 1


Contenders = dict[str, dict[str, Callable[[], Any]]]


def _best_of_each(calls: Contenders) -> Contenders:
    """The fastest call of each operation, by the median of 15 rounds on their own; the rest of the run is theirs."""
    seconds = _rounds(calls, 15)
    best = {kind: min(of, key=lambda name: statistics.median(of[name])) for kind, of in seconds.items()}
    return {kind: {name: calls[kind][name]} for kind, name in best.items()}


def _rounds(
    contenders: Contenders, repeats: int, *, between: Callable[[], object] = lambda: None
) -> dict[str, dict[str, list[float]]]:
    """Time every contender once a round, in an order drawn anew each round; `between` runs after every 20 rounds.

    The order matters: whoever follows a contender that touched the same rows finds them in the server's caches.
    """
    seconds: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in of} for kind, of in contenders.items()}
    order = np.random.default_rng(11)
    for round_number in range(-3, repeats):  # three rounds to warm up
        if round_number % 20 == 0:
            between()
        for kind, calls in contenders.items():
            names = list(calls)
            for name in (names[place] for place in order.permutation(len(names))):
                start_s = time.perf_counter()
                calls[name]()
                if round_number >= 0:
                    seconds[kind][name].append(time.perf_counter() - start_s)
    return seconds


def _connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(unquote(parts.path))
        return sock
    return socket.create_connection((parts.hostname, parts.port or 6379))


def _pin(server_process_id: int) -> None:
    """Give the server and this process a CPU each, so that the scheduler cannot put both on one for a while."""
    client_cpu, server_cpu = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(server_process_id, {server_cpu})
    os.sched_setaffinity(0, {client_cpu})


def summarise(seconds: dict[str, dict[str, list[float]]], num_rows: int) -> dict[str, Any]:
    """Medians in milliseconds, rates, and the two ratios that matter."""
    summary: dict[str, Any] = {}
    for kind, of in seconds.items():
        medians = {name: statistics.median(values) for name, values in of.items()}
        best_name = min((name for name in medians if name.startswith("redis-py")), key=medians.__getitem__)
        summary[kind] = {
            "median_ms": {name: round(value * 1e3, 3) for name, value in medians.items()},
            "million_rows_per_s": {name: round(num_rows / value / 1e6, 3) for name, value in medians.items()},
            "ours_over_replay": round(medians["replay"] / medians["ours"], 3),
            "ours_over_redis_py": round(medians[best_name] / medians["ours"], 3),
            "best_redis_py": best_name,
        }
        if "fenced" in medians:
            for name in ("ours", "plain"):
                summary[kind][f"fenced_over_{name}"] = round(medians["fenced"] / medians[name], 3)
    return summary


def main() -> None:
    """Measure, print a table, and write the figures as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="", help="one server; default: a private embedded one")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--row-bytes", type=int, default=256)
    parser.add_argument("--tables", type=int, default=1)
    parser.add_argument("--buckets", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument(
        "--server", type=Path, default=None, help="binary of the embedded server; default: found on PATH"
    )
    parser.add_argument("--pin", action="store_true", help="one CPU for the embedded server, another for the client")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    work = Workload(options)
    with contextlib.ExitStack() as stack:
        url = options.url
        if not url:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bagpipe-bench-"))
            server = stack.enter_context(EmbeddedServer(folder, binary=options.server))
            url = server.url
            if options.pin:
                _pin(server.process_id)
        seconds = measure(url, work, options.repeats)
        client = redis.Redis.from_url(url)
        info = client.info("server")
        client.close()
    report = {
        "rows": options.rows,
        "row_bytes": options.row_bytes,
        "tables": options.tables,
        "buckets": options.buckets,
        "repeats": options.repeats,
        "pinned": options.pin,
        "server": f"{info.get('server_name', 'redis')} {info.get('valkey_version', info['redis_version'])}",
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "redis-py": redis.__version__,
        "results": summarise(seconds, options.rows),
    }
    for kind, result in report["results"].items():
        for name, value in result["median_ms"].items():
            rate = result["million_rows_per_s"][name]
            sys.stdout.write(f"{kind:6} {name:28} {value:8.3f} ms {rate:8.3f} M rows/s\n")
        if "fenced_over_plain" in result:
            sys.stdout.write(
                f"{kind:6} fenced takes {result['fenced_over_plain']:.2f} times as long as plain, "
                f"{result['fenced_over_ours']:.2f} times as long as ours\n"
            )
        sys.stdout.write(
            f"{kind:6} ours / replay {result['ours_over_replay']:.2f}x   "
            f"ours / {result['best_redis_py']} {result['ours_over_redis_py']:.2f}x\n"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
