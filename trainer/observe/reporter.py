"""`Reporter`: tells the sinks of one rank what the job does.

    phase ─┐
    training: on_batch ─ at each pace ─ Progress ─ Meter ─> interval, checkpoint ─┼─ Event ─> every sink
    evaluation, end, an error ───────────────────────────────────────────────────┘

*A sink never ends a job*: one that fails is closed, with a line on stderr, and training goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from bagpipe.cache.staging import PendingTensor, to_host
from bagpipe.pipeline.stream import Streams
from bagpipe.training.engine import OnBatch
from bagpipe.training.progress import Progress
from bagpipe.util.program import note
from trainer.metrics import Quality
from trainer.observe.events import Event, Kind, Sink
from trainer.observe.meter import LossSoFar, Meter

__all__ = ["Reporter", "TrainingFacts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """Facts of a run of training that its reports need.

    Attributes:
        streams: streams of the model's device. The loss is copied from the device asynchronously and lags by some
            batches, so that no batch waits for it. The final loss is exact.
        shows_loss: False if other ranks compute losses, so that this rank's sum is incomplete.
        steps, samples: trained before the run.
        num_steps: steps of the whole job, at most; None: unknown.
        published: step of the newest checkpoint that this process published; None: none.
        rates: learning rates of the latest batch, by name, for the values of an interval.
        gradient_norm: norm of the gradients of the latest batch before its limit, a scalar on the device; None: no
            limit. It is copied with the loss.
    """

    streams: Streams
    shows_loss: bool = True
    steps: int = 0
    samples: int = 0
    num_steps: int | None = None
    published: Callable[[], int | None] = lambda: None
    rates: Callable[[], Mapping[str, Any]] = dict
    gradient_norm: Callable[[], Tensor | None] = lambda: None


class Reporter:
    """Tells events to sinks. One thread calls it. A context manager, which closes the sinks.

    Args:
        sinks: who is told.
        clock: seconds of a monotonic clock.
    """

    def __init__(self, sinks: Sequence[Sink] = (), *, clock: Callable[[], float] = time.monotonic) -> None:
        self._sinks = list(sinks)
        self._clock = clock
        self._began_s = clock()
        self._step: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, SystemExit):
            self._tell("error", {"type": type(error).__name__, "error": str(error)})
        for sink in list(self._sinks):
            self._close(sink, failed=error is not None)

    def phase(self, name: str, **values: Any) -> None:
        """A part of the job begins."""
        self._tell("phase", {"phase": name, **values})

    def evaluation(self, step: int, quality: Quality) -> None:
        """The held-out examples are scored after so many steps."""
        self._step = step
        self._tell("evaluation", {**quality.values(), "left_out": quality.reasons()})

    def end(self, result: Mapping[str, Any]) -> None:
        """The result is known."""
        self._tell("end", result)

    @contextmanager
    def training(self, facts: TrainingFacts) -> Iterator[OnBatch | None]:
        """The function to call after every batch; None: nothing is told. The last interval ends with the block."""
        if not self._sinks:
            yield None
            return
        self._step = facts.steps
        self.phase("training", samples=facts.samples)
        run = _TrainingRun(facts, self._sinks, self._clock)
        yield lambda totals: self._tell_all(run.after_batch(totals))
        self._tell_all(run.last())

    def _tell_all(self, events: Sequence[tuple[Sink | None, Kind, int, dict[str, Any]]]) -> None:
        for sink, kind, step, values in events:
            self._step = step
            self._tell(kind, values, sink)

    def _tell(self, kind: Kind, values: Mapping[str, Any], only: Sink | None = None) -> None:
        event = Event(kind=kind, elapsed_s=self._clock() - self._began_s, step=self._step, values=values)
        for sink in [only] if only is not None else list(self._sinks):
            if sink not in self._sinks:
                continue
            try:
                sink.take(event)
            except Exception as error:  # a full disk, a tracker's server that is gone
                _note_failure(sink, error)
                self._close(sink, failed=True)

    def _close(self, sink: Sink, *, failed: bool) -> None:
        self._sinks.remove(sink)
        try:
            sink.close(failed=failed)
        except Exception as error:
            _note_failure(sink, error)


class _TrainingRun:
    """The events of one run of training: what is due after a batch, and at the end."""

    def __init__(self, facts: TrainingFacts, sinks: Sequence[Sink], clock: Callable[[], float]) -> None:
        self._facts = facts
        self._clock = clock
        now_s = clock()
        self._meters = [
            (sink, Meter(now_s, steps=facts.steps, samples=facts.samples, num_steps=facts.num_steps)) for sink in sinks
        ]
        self._totals: Callable[[], Progress] | None = None
        self._pending: tuple[PendingTensor, int] | None = None
        self._loss: LossSoFar | None = None
        self._published = facts.published()

    def after_batch(self, totals: Callable[[], Progress]) -> list[tuple[Sink | None, Kind, int, dict[str, Any]]]:
        """The events that are due: the sink, None for all; kind, step, values."""
        self._totals = totals
        now_s = self._clock()
        due = [(sink, meter) for sink, meter in self._meters if now_s - meter.began_s >= sink.every_s]
        if not due:
            return []
        progress = totals()
        self._request_loss(progress)
        self._read_loss()
        return self._events(due, now_s, progress)

    def last(self) -> list[tuple[Sink | None, Kind, int, dict[str, Any]]]:
        """The events of the end, with the final loss."""
        if self._totals is None:
            return []
        progress = self._totals()
        self._pending = None
        self._request_loss(progress)
        self._read_loss(waits=True)
        due = [(sink, meter) for sink, meter in self._meters if meter.samples != progress.samples]
        return self._events(due, self._clock(), progress)

    def _events(
        self, due: Sequence[tuple[Sink, Meter]], now_s: float, progress: Progress
    ) -> list[tuple[Sink | None, Kind, int, dict[str, Any]]]:
        events: list[tuple[Sink | None, Kind, int, dict[str, Any]]] = []
        published = self._facts.published()
        if published != self._published:
            self._published = published
            events.append((None, "checkpoint", progress.steps, {"checkpoint_step": published}))
        for sink, meter in due:
            values = {**meter.measure(now_s, progress, self._loss), **self._facts.rates()}
            events.append((sink, "interval", progress.steps, values))
        return events

    def _request_loss(self, progress: Progress) -> None:
        """Start copying the loss to the host, unless a copy is in progress."""
        if self._facts.shows_loss and self._pending is None and progress.samples:
            norm = self._facts.gradient_norm()
            numbers = [progress.loss_sum] if norm is None else [progress.loss_sum, norm]
            self._pending = to_host(self._facts.streams, torch.stack([n.double() for n in numbers])), progress.samples

    def _read_loss(self, *, waits: bool = False) -> None:
        """Read the pending loss if the copy is done; with `waits`, wait for it."""
        if self._pending is not None and (waits or self._pending[0].is_ready()):
            pending, samples = self._pending
            loss_sum, *norms = pending.get().tolist()
            self._loss = LossSoFar(loss_sum=loss_sum, samples=samples, gradient_norm=norms[0] if norms else None)
            self._pending = None


def _note_failure(sink: Sink, error: Exception) -> None:
    text = " ".join(str(error).split())
    note(f"{type(sink).__name__} ends, training goes on: {type(error).__name__}: {text}")
