"""Prometheus metrics, read from the daemon's own records at each scrape.

GET /metrics ─> collector ─> Counters.totals(), Jobs.counts(), Run.statistics() of every run
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bagpipe.client.address import Address
from bagpipe.errors import InputError
from cacher.server import Snapshot

__all__ = ["serve_metrics"]

_SNAPSHOT_TIMEOUT_S = 5.0


@contextmanager
def serve_metrics(listen: Address, snapshot: Callable[[], Snapshot], loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Serve scrapes in separate threads.

    Args:
        listen: host and port.
        snapshot: called for each scrape, on the loop's thread.
        loop: the daemon's.

    Raises:
        InputError: cannot listen at the address.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_DaemonCollector(snapshot, loop))
    try:
        server, thread = start_http_server(listen.port, listen.host, registry)
    except OSError as error:
        raise InputError(f"--metrics {listen}: {error.strerror or error}") from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _DaemonCollector(Collector):
    def __init__(self, snapshot: Callable[[], Snapshot], loop: asyncio.AbstractEventLoop) -> None:
        self._snapshot = snapshot
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        now = asyncio.run_coroutine_threadsafe(self._take(), self._loop).result(_SNAPSHOT_TIMEOUT_S)
        totals = now.totals
        for name, text, value in (
            ("batches_planned", "Global batches planned", totals.batches_planned),
            ("plan_seconds", "Seconds spent planning", totals.plan_s),
            ("encode_seconds", "Seconds spent cutting and serialising rank batches", totals.encode_s),
            ("batches_sent", "Rank batches sent", totals.batches_sent),
            ("sent_bytes", "Bytes of rank batches sent", totals.bytes_sent),
            ("streams", "Streams with a Hello", totals.streams),
            ("refused", "Handshakes and requests refused", totals.refused),
            ("dropped", "Streams ended for silence or invalid messages", totals.dropped),
        ):
            yield CounterMetricFamily(f"bagpipe_cacher_{name}", text, value=value)
        for name, text, value in (
            ("jobs", "Jobs served", now.jobs),
            ("ranks", "Ranks connected", now.ranks),
            ("planners", "Planners of jobs that bring their own batches", now.planners),
            ("silent_streams", "Streams without a Hello yet", now.silent),
        ):
            yield GaugeMetricFamily(f"bagpipe_cacher_{name}", text, value=value)
        yield from self._runs(now)

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not query the daemon before it runs."""
        return iter(())

    async def _take(self) -> Snapshot:
        return self._snapshot()

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
