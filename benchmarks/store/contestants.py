"""The contestants: the store, the bytes it sends replayed on a raw socket, and redis-py's calls for the same rows."""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import redis
from numpy.typing import NDArray

from bagpipe.store.fencing.fence import Fence, Ledger
from bagpipe.store.interface import WriteRequest
from bagpipe.store.keys import bucket_key
from bagpipe.store.redis.resp_rows import FieldEncoder, RowEncoder, hmget_header, hset_header
from bagpipe.store.redis.routing import Router, servers_of_buckets
from bagpipe.store.redis.row_codecs import max_command_rows
from bagpipe.store.redis.row_replies import RowFormat
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.row_checksum import value_dtype
from bagpipe.types.schema import RowSchema, RowTable
from benchmarks.harness.rounds import medians, time_rounds
from benchmarks.store.plain_writer import PlainWriter
from benchmarks.store.tfra import TfraPeer

__all__ = ["TFRA", "Requests", "Workload", "measure"]

#: Operation (read, write) -> contestant -> call.
Contestants = dict[str, dict[str, Callable[[], Any]]]

NAMESPACE = "bench"
FENCED_NAMESPACE = "bench-fenced"
#: Rounds between two checkpoints of the fenced writer.
CHECKPOINT_ROUNDS = 20
#: Name of tensorflow-recommenders-addons among the contestants.
TFRA = "tfra"
WARMUP_ROUNDS = 3
#: Of a read: table number and ids.
Requests = list[tuple[int, NDArray[np.int64]]]


class Workload:
    """One batch: ids and rows of every table, and the bytes and arguments prepared from them.

    Args:
        num_rows: of the batch, in equal shares of all tables.
        row_bytes: of a row.
        num_tables: number of tables.
        num_buckets: of the namespace.
    """

    def __init__(self, *, num_rows: int, row_bytes: int, num_tables: int, num_buckets: int) -> None:
        rng = np.random.default_rng(7)
        self.num_rows, self.row_bytes, self.num_buckets = num_rows, row_bytes, num_buckets
        dim = self.row_bytes // 4
        self.schema = RowSchema(
            tables=tuple(RowTable(name=f"t{number}", dim=dim) for number in range(num_tables)), optimizer="sgd"
        )
        shares = np.array_split(np.arange(self.num_rows), num_tables)
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
        checks = np.empty(self.num_rows, np.uint64)
        data = RowEncoder(self.row_bytes).encode(self.sent_tables, self.sent_ids, rows[self.order], checks)
        data = data.reshape(self.num_rows, -1)
        return b"".join(
            hset_header(key, stop - start) + data[start:stop].tobytes() for key, start, stop in self.commands
        )

    def read_reply_bytes(self) -> int:
        """Bytes of the replies to `encoded_read` when every row is found."""
        row_format = RowFormat(value_dtype(self.row_bytes))
        return sum(row_format.max_reply_bytes(stop - start) for _, start, stop in self.commands)

    def write_reply_bytes(self) -> int:
        """Bytes of the replies to `encoded_write` when every row exists: `:0 CR LF` a command."""
        return 4 * len(self.commands)


def _as_slice(share: NDArray[np.int64]) -> slice:
    return slice(int(share[0]), int(share[-1]) + 1)


def replay(sock: socket.socket, request: bytes, reply_bytes: int, buffer: memoryview) -> Callable[[], None]:
    """A call that sends `request` and reads `reply_bytes` bytes, nothing else."""

    def run() -> None:
        sock.sendall(request)
        left = reply_bytes
        while left:
            left -= sock.recv_into(buffer, min(left, len(buffer)))

    return run


def redis_py_calls(client: redis.Redis, work: Workload) -> dict[str, dict[str, Callable[[], Any]]]:
    """redis-py's calls for the same rows, with arguments prepared in advance."""
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


def measure(
    url: str, work: Workload, repeats: int, tfra_python: Path | None = None
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every round of every contestant, per operation.

    The order changes every round: a contestant that follows one that touched the same rows finds them in the server's
    processor caches. `tfra_python`: the interpreter of `TfraPeer`, which then takes part.
    """
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
        contestants = _best_of_each(redis_py_calls(client, work))
        contestants["write"] |= {
            "ours": lambda: store.write_many(work.writes),
            "fenced": lambda: fenced.write_many(work.writes),
            "plain": plain.write,
            "replay": replay(raw, work.encoded_write(), work.write_reply_bytes(), buffer),
        }
        contestants["read"] |= {
            "ours": lambda: store.read_many(work.reads),
            "replay": replay(raw, work.encoded_read(), work.read_reply_bytes(), buffer),
        }
        peer = None
        if tfra_python is not None:
            tables, ids = (np.concatenate(parts) for parts in zip(*map(_rows_of, work.reads), strict=True))
            peer = stack.enter_context(TfraPeer(tfra_python, url, tables=tables, ids=ids, rows=work.rows))
            contestants["write"][TFRA], contestants["read"][TFRA] = peer.write, peer.read
        contestants["write"]["ours"]()
        results = store.read_many(work.reads)
        assert all(result.found.all() for result in results)
        assert (np.concatenate([result.rows for result in results]) == work.rows).all()
        return _rounds(contestants, repeats, writer, peer)


def _rows_of(request: tuple[int, NDArray[np.int64]]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    table, ids = request
    return np.full(len(ids), table, np.uint32), ids


def _rounds(
    contestants: Contestants, repeats: int, writer: FencedWriter, peer: TfraPeer | None
) -> dict[str, dict[str, list[float]]]:
    """Every round times all writes in a new order, then all reads; logs are removed every 20 rounds."""
    seconds: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in of} for kind, of in contestants.items()}
    for number in range(-WARMUP_ROUNDS, repeats):
        if number % CHECKPOINT_ROUNDS == 0:
            writer.checkpoint()
        for kind, calls in contestants.items():
            for name, taken_s in time_rounds(calls, 1, shuffle_seed=number).items():
                if number >= 0:
                    seconds[kind][name] += taken_s if peer is None or name != TFRA else [peer.seconds]
    return seconds


class FencedWriter:
    """A writer with a fence, whose logs are removed as by a checkpoint."""

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


def _best_of_each(calls: Contestants) -> Contestants:
    """The fastest call of each operation, by the median of 15 rounds of their own."""
    return {kind: {name: of[name]} for kind, of in calls.items() for name in [_fastest(of)]}


def _fastest(calls: Mapping[str, Callable[[], Any]]) -> str:
    seconds = medians(time_rounds(calls, 15, warmups=WARMUP_ROUNDS, shuffle_seed=11))
    return min(seconds, key=seconds.__getitem__)


def _connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(unquote(parts.path))
        return sock
    return socket.create_connection((parts.hostname, parts.port or 6379))
