"""Prometheus metrics of one rank, and its health over HTTP.

    GET /metrics              exposition of the latest interval, and of the age of the last step
    GET /healthz              {"phase", "step", "step_age_s"} as JSON
    GET /healthz?max_age_s=N  the same; 503 if nothing has happened for more than N seconds

Scrapes are answered in threads of their own, from records that the training thread replaces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bagpipe.util.status_server import StatusServer
from trainer.metrics import by_label
from trainer.observe.events import Event

__all__ = ["Exporter"]

#: Totals of an interval -> name and help of the counter.
_COUNTERS: Mapping[str, tuple[str, str]] = {
    "samples": ("samples", "Examples trained, of the whole job"),
    "rows_unique": ("rows_unique", "Unique rows of all batches"),
    "rows_inserted": ("rows_missed", "Unique rows that were not in the cache"),
    "rows_found": ("rows_found", "Those of them that the store had"),
    "rows_fetched": ("rows_fetched", "Rows read from the store"),
    "rows_written": ("rows_written", "Rows written to the store"),
    "evictions_waiting": ("evictions_waiting", "Rows that left right after their use, so that the next batch waited"),
    "exposed_s": ("exposed_seconds", "Seconds the compute lane waited for rows"),
    "skipped_batches": ("skipped_batches", "Batches left out for a loss or gradient that is not finite"),
}
_GAUGES: Mapping[str, tuple[str, str]] = {
    "samples_per_s": ("samples_per_second", "Examples per second of the latest interval"),
    "loss": ("loss", "Mean training loss of the whole job"),
    "interval_loss": ("interval_loss", "Mean training loss of the latest interval"),
    "loss_scale": ("loss_scale", "Factor of the loss"),
    "grad_norm": ("gradient_norm", "Norm of the gradients in optim.clip_scope before the limit, of a late batch"),
    "dense_lr": ("dense_learning_rate", "Learning rate of the dense part in the latest batch"),
    "rows_lr": ("rows_learning_rate", "Learning rate optim.rows_lr of rows in the latest batch"),
    "eta_s": ("eta_seconds", "Time to the last step, where it is known"),
}


class Exporter(Collector):
    """The server, and the sink of what it serves.

    Args:
        host, port: address; port 0: any.
        rank: label of all metrics.
        every_s: time between two intervals.
        clock: seconds of a monotonic clock.

    Attributes:
        port: the one that is listened on.

    Raises:
        InputError: cannot listen at the address.
    """

    def __init__(
        self, host: str, port: int, *, rank: int = 0, every_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.every_s = every_s
        self._rank = str(rank)
        self._clock = clock
        self._phase = "starting"
        self._step = 0
        self._checkpoints = 0
        self._moved_s = clock()
        self._interval: Mapping[str, Any] = {}
        self._quality: Mapping[str, Any] = {}
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(self)
        self._server = StatusServer(
            host, port, metrics=make_wsgi_app(registry), pages={"/healthz": self._health}, subject="run.metrics"
        )
        self.port = self._server.port

    def take(self, event: Event) -> None:
        if event.kind == "phase":
            self._phase = event.values["phase"]
        elif event.kind == "interval":
            self._interval = event.values
        elif event.kind == "checkpoint":
            self._checkpoints += 1
        elif event.kind == "evaluation":
            self._quality = event.values
        self._step, self._moved_s = event.step or self._step, self._clock()

    def close(self, *, failed: bool) -> None:
        self._server.close()

    def describe(self) -> Iterator[Metric]:
        """Nothing: the names depend on what is known."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        interval, quality = self._interval, self._quality
        yield self._metric(CounterMetricFamily, "steps", "Batches trained, of the whole job", self._step)
        yield self._metric(CounterMetricFamily, "checkpoints", "Checkpoints of this process", self._checkpoints)
        yield self._metric(GaugeMetricFamily, "step_age_seconds", "Time since the last step or phase", self._age_s())
        phase = GaugeMetricFamily("bagpipe_trainer_phase", "1 for what the job does", labels=["rank", "phase"])
        phase.add_metric([self._rank, self._phase], 1)
        yield phase
        for family, table in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for key, (name, text) in table.items():
                if interval.get(key) is not None:
                    yield self._metric(family, name, text, interval[key])
        rates = GaugeMetricFamily(
            "bagpipe_trainer_table_rows_learning_rate",
            "Learning rate of rows of a table of optim.rows_lr_by_table in the latest batch",
            labels=["rank", "table"],
        )
        for table, rate in interval.get("rows_lr_by_table", {}).items():
            rates.add_metric([self._rank, table], rate)
        yield rates
        yield from self._lanes(interval.get("lanes", {}))
        found = by_label(quality)
        labels = ["rank", "metric"] if "" in found else ["rank", "metric", "task"]
        scores = GaugeMetricFamily("bagpipe_trainer_quality", "Metrics of held-out examples", labels=labels)
        for task, values in found.items():
            for name, value in values.items():
                scores.add_metric([self._rank, name, *filter(None, [task])], value)
        yield scores

    def _lanes(self, lanes: Mapping[str, Any]) -> Iterator[Metric]:
        busy = CounterMetricFamily("bagpipe_trainer_lane_busy_seconds", "Work of a lane", labels=["rank", "lane"])
        waits = CounterMetricFamily(
            "bagpipe_trainer_lane_wait_seconds", "Waits of a lane by what it waited for", labels=["rank", "lane", "op"]
        )
        moved = CounterMetricFamily(
            "bagpipe_trainer_lane_moved_bytes", "Bytes that a lane moved", labels=["rank", "lane"]
        )
        for lane, times in lanes.items():
            if "moved_bytes" in times:
                moved.add_metric([self._rank, lane], times["moved_bytes"])
            busy.add_metric([self._rank, lane], times["busy_s"])
            for op, wait_s in times["waits_s"].items():
                waits.add_metric([self._rank, lane, op], wait_s)
        yield from (busy, waits, moved)

    def _metric(
        self, family: Callable[..., CounterMetricFamily | GaugeMetricFamily], name: str, text: str, value: float
    ) -> Metric:
        metric = family(f"bagpipe_trainer_{name}", text, labels=["rank"])
        metric.add_metric([self._rank], value)
        return metric

    def _age_s(self) -> float:
        return self._clock() - self._moved_s

    def _health(self, query: Mapping[str, list[str]]) -> tuple[bool, Mapping[str, Any]]:
        age_s = self._age_s()
        try:
            max_age_s = float(query.get("max_age_s", ["inf"])[0])
        except ValueError:
            max_age_s = float("inf")
        return age_s <= max_age_s, {"phase": self._phase, "step": self._step, "step_age_s": round(age_s, 3)}
