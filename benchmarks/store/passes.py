"""What a client costs: its CPU time per batch, pass by pass over the bytes.

    python -m benchmarks.store.passes [--server BINARY] [--rounds 200]

Settings take turns batch by batch. Every function named in `PASSES` counts the CPU time of its thread without that of
the functions it calls; the clock's own cost is taken off. The rest of a batch is the client's bookkeeping. A machine
under load shows larger figures, because its caches are shared; compare columns, not runs.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from bagpipe.store.fencing.fence import Fence
from bagpipe.store.redis import read_codec, resp_rows, row_codecs, row_reader, store
from bagpipe.store.redis.fenced_write import Transaction
from bagpipe.store.redis.link import Link
from bagpipe.store.redis.row_replies import RowReplies
from bagpipe.store.redis.shard_client import ServerListClient
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from benchmarks.harness.report import table
from benchmarks.store.contestants import Requests, Workload

#: Pass -> its functions: owner and attribute.
PASSES: Mapping[str, list[tuple[Any, str]]] = {
    "validate, route": [(store, "check_write"), (row_reader, "check_read"), (ServerListClient, "route")],
    "check words": [(resp_rows, "check_words"), (read_codec, "check_words")],
    "gather, encode": [
        (row_codecs.WriteCodec, "_encode"),
        (resp_rows.RowEncoder, "encode"),
        (resp_rows.FieldEncoder, "encode"),
        (read_codec.ReadCodec, "_requests"),
        (row_codecs.WriteCodec, "_transaction"),
        (Transaction, "head"),
        (Transaction, "tail"),
    ],
    "send": [(Link, "send")],
    "receive": [(Link, "receive")],
    "parse replies": [
        (RowReplies, "__init__"),
        (RowReplies, "decode"),
        (row_codecs, "decode_counts"),
        (Transaction, "accept"),
    ],
    "rows to their places": [(read_codec, "fill_group")],
}
REST = "the rest"
SETTINGS = ((10_000, 256, 1), (10_000, 256, 26), (1_000, 128, 1), (1_000, 128, 26))
NUM_BUCKETS = 64
WARMUP_ROUNDS = 5


class PassClock:
    """CPU time of the wrapped functions since `reset`, each without the wrapped functions that it calls.

    Attributes:
        seconds: by pass.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []
        start_s = time.thread_time()
        for _ in range(1000):
            time.thread_time()
        self._clock_s = (time.thread_time() - start_s) / 1000

    def reset(self) -> None:
        """Forget what was counted."""
        self.seconds.clear()

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function that counts its time for pass `name`."""

        @wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start_s = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                taken_s = time.thread_time() - start_s
                self.seconds[name] += taken_s - self._inner.pop() - self._clock_s
                if self._inner:
                    self._inner[-1] += taken_s + self._clock_s

        return counted


@contextlib.contextmanager
def counting() -> Iterator[PassClock]:
    """Count the functions of `PASSES` in the block."""
    clock = PassClock()
    with contextlib.ExitStack() as stack:
        for name, functions in PASSES.items():
            for owner, attribute in functions:
                call = getattr(owner, attribute)
                stack.callback(setattr, owner, attribute, call)
                setattr(owner, attribute, clock.wrap(name, call))
        yield clock


def third_missing(reads: Requests) -> Requests:
    """The same requests with other ids in place of every third."""
    changed = []
    for number, ids in reads:
        ids = ids.copy()
        ids[::3] = -1 - np.arange(len(ids[::3]))
        changed.append((number, ids))
    return changed


def calls_of(url: str, work: Workload, stack: contextlib.ExitStack) -> dict[str, Callable[[], object]]:
    """The store's calls on one batch, by name."""
    rows = f"{work.num_rows}-{len(work.reads)}"

    def opened(namespace: str) -> RedisStore:
        made = RedisStore(url, schema=work.schema, namespace=f"{namespace}-{rows}", num_buckets=NUM_BUCKETS)
        return stack.enter_context(made)

    plain, fenced = opened("unfenced"), opened("fenced")
    plain.claim()
    ledger, token = stack.enter_context(fenced.ledger()), f"1-{uuid.uuid4().hex}"
    ledger.acquire(token)
    ledger.begin("bench:0", 1)
    fenced.fence(Fence(token=token, writer=0, epoch=1))
    plain.write_many(work.writes)
    missing = third_missing(work.reads)
    return {
        "write": lambda: plain.write_many(work.writes),
        "write with a fence": lambda: fenced.write_many(work.writes),
        "read": lambda: plain.read_many(work.reads),
        "read, a third missing": lambda: plain.read_many(missing),
    }


def measure(url: str, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds per pass, and `REST`, of every setting and call."""
    with contextlib.ExitStack() as stack:
        calls = {}
        for num_rows, row_bytes, num_tables in SETTINGS:
            work = Workload(num_rows=num_rows, row_bytes=row_bytes, num_tables=num_tables, num_buckets=NUM_BUCKETS)
            tables = f"{num_tables} table{'s' * (num_tables > 1)}"
            for name, call in calls_of(url, work, stack).items():
                calls[f"{num_rows:,} x {row_bytes} B, {tables}: {name}"] = call
        clock = stack.enter_context(counting())
        samples: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in calls}
        for number in range(-WARMUP_ROUNDS, rounds):
            for name, call in calls.items():
                clock.reset()
                start_s = time.thread_time()
                call()
                whole_s = time.thread_time() - start_s
                if number >= 0:
                    for each in PASSES:
                        samples[name][each].append(clock.seconds[each])
                    samples[name][REST].append(whole_s - sum(clock.seconds.values()))
    return {name: {each: statistics.median(of) for each, of in by.items()} for name, by in samples.items()}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=Path, help="binary of the embedded server; default: found on PATH")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="bagpipe-bench-") as folder,
        EmbeddedServer(folder, binary=options.server) as server,
    ):
        found = measure(server.url, options.rounds)
    rows = []
    for name, seconds in found.items():
        each = [f"{seconds[part] * 1e6:.0f}" for part in (*PASSES, REST)]
        rows.append((name, *each, f"{sum(seconds.values()) * 1e6:.0f}"))
    print(table(("us of CPU time per batch, 64 buckets", *PASSES, REST, "all"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
