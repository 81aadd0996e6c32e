"""Prometheus metrics and health over HTTP, read from the daemon's own records at each request.

GET /metrics ─> collector ─> Counters.totals(), Jobs.counts(), Run.statistics() of every run
GET /healthz ─> 200 while the event loop answers, else 503      GET /readyz ─> 503 also while the daemon drains
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bagpipe.client.address import Address
from bagpipe.util.status_server import StatusServer
from cacher.server import Snapshot

__all__ = ["serve_metrics"]

_SNAPSHOT_TIMEOUT_S = 5.0


@contextmanager
def serve_metrics(listen: Address, snapshot: Callable[[], Snapshot], loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Serve scrapes and probes in separate threads.

    Args:
        listen: host and port.
        snapshot: called for each scrape, on the loop's thread.
        loop: the daemon's.

    Raises:
        InputError: cannot listen at the address.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    state = _State(snapshot, loop)
    registry.register(_DaemonCollector(state))
    pages = {"/healthz": state.health, "/readyz": state.readiness}
    server = StatusServer(listen.host, listen.port, metrics=make_wsgi_app(registry), pages=pages, subject="--metrics")
    try:
        yield
    finally:
        server.close()


class _State:
    """The daemon's state for other threads: taken by its event loop."""

    def __init__(self, snapshot: Callable[[], Snapshot], loop: asyncio.AbstractEventLoop) -> None:
        self._snapshot = snapshot
        self._loop = loop

    def now(self) -> Snapshot:
        """The state. Raises TimeoutError if the loop does not answer."""
        taking = asyncio.run_coroutine_threadsafe(self._take(), self._loop)
        try:
            return taking.result(_SNAPSHOT_TIMEOUT_S)
        except TimeoutError:
            taking.cancel()
            raise

    def health(self, query: Mapping[str, list[str]]) -> tuple[bool, Mapping[str, Any]]:
        try:
            now = self.now()
        except TimeoutError:
            return False, {"state": "stuck"}
        return True, {"state": "draining" if now.is_draining else "serving", "jobs": now.jobs, "ranks": now.ranks}

    def readiness(self, query: Mapping[str, list[str]]) -> tuple[bool, Mapping[str, Any]]:
        is_well, said = self.health(query)
        return is_well and said["state"] == "serving", said

    async def _take(self) -> Snapshot:
        return self._snapshot()


class _DaemonCollector(Collector):
    def __init__(self, state: _State) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        now = self._state.now()
        totals = now.totals
        for name, text, value in (
            ("batches_planned", "Global batches planned", totals.batches_planned),
            ("plan_seconds", "Seconds spent planning", totals.plan_s),
            ("encode_seconds", "Seconds spent cutting and serialising rank batches", totals.encode_s),
            ("batches_sent", "Rank batches sent", totals.batches_sent),
            ("sent_bytes", "Bytes of rank batches sent", totals.bytes_sent),
            ("shared_bytes", "Those of them sent through shared memory", totals.bytes_shared),
            ("batches_indexed", "Batches indexed as a shard", totals.batches_indexed),
            ("index_seconds", "Seconds spent indexing as a shard", totals.index_s),
            ("indexed_bytes", "Bytes of indexes made as a shard", totals.bytes_indexed),
            ("streams", "Streams with a Hello", totals.streams),
            ("refused", "Handshakes and requests refused", totals.refused),
            ("dropped", "Streams ended for silence or invalid messages", totals.dropped),
        ):
            yield CounterMetricFamily(f"bagpipe_cacher_{name}", text, value=value)
        for name, text, value in (
            ("jobs", "Jobs served", now.jobs),
            ("ranks", "Ranks connected", now.ranks),
            ("planners", "Planners of jobs that bring their own batches", now.planners),
            ("indexing", "Phases indexed as a shard", now.indexing),
            ("silent_streams", "Streams without a Hello yet", now.silent),
        ):
            yield GaugeMetricFamily(f"bagpipe_cacher_{name}", text, value=value)
        yield from self._runs(now)
        yield from self._shards(now)

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not query the daemon before it runs."""
        return iter(())

    def _runs(self, now: Snapshot) -> Iterator[Metric]:
        by_rank = ["job", "run", "rank"]
        depth = GaugeMetricFamily("bagpipe_cacher_queue_batches", "Serialised batches held for a rank", labels=by_rank)
        free = GaugeMetricFamily("bagpipe_cacher_credits", "Batches that a rank can still receive", labels=by_rank)
        held = GaugeMetricFamily("bagpipe_cacher_queue_bytes", "Bytes of batches held", labels=["job", "run"])
        for job, number, run in now.runs:
            for rank, (batches, credits) in enumerate(zip(run.batches_buffered, run.credits_free, strict=True)):
                depth.add_metric([job, str(number), str(rank)], batches)
                free.add_metric([job, str(number), str(rank)], credits)
            held.add_metric([job, str(number)], run.bytes_buffered)
        yield from (depth, free, held)

    def _shards(self, now: Snapshot) -> Iterator[Metric]:
        """By number, since the name of a shard that this daemon starts has its process."""
        for name, text, field in (
            ("batches", "Indexes received from a shard", "batches"),
            ("bytes", "Bytes of these indexes", "num_bytes"),
            ("busy_seconds", "Seconds that a shard spent indexing and serialising", "busy_s"),
            ("idle_seconds", "Seconds that a shard was ahead and waited", "idle_s"),
            ("waited_seconds", "Seconds that the planner waited for a shard", "waited_s"),
            ("losses", "Streams of a shard lost", "losses"),
        ):
            counter = CounterMetricFamily(f"bagpipe_cacher_shard_{name}", text, labels=["shard"])
            for number, (_, totals) in enumerate(now.shards):
                counter.add_metric([str(number)], getattr(totals, field))
            yield counter
        memory = GaugeMetricFamily("bagpipe_cacher_shard_rss_bytes", "Memory of a shard's process", labels=["shard"])
        for number, (_, totals) in enumerate(now.shards):
            memory.add_metric([str(number)], totals.rss_bytes)
        yield memory
