"""A program that runs a few batches in direct mode with torch's CUDA sanitizer on every lane's operators.

    TORCH_CUDA_SANITIZER=1 python -m tests.gpu.sanitized DEVICE [LANE SOURCE]     LANE's stream does not wait for SOURCE

The sanitizer's mode is per thread, and its records are not thread-safe: each lane enters a mode that forwards operators
one at a time. The sanitizer tracks whole tensors, so two lanes in different slots of the cache would be a false race:
direct mode has no such lanes. It does not see Triton kernels.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.cuda import _sanitizer
from torch.utils._python_dispatch import TorchDispatchMode

from bagpipe.pipeline.stream import Event, Stream, Streams
from bagpipe.schedule.ir.program import Resource
from bagpipe.testing.plain_job import PlainJob, PlainSettings
from tests.gpu.jobs import SHAPES, batches_of, schema_of

_ONE_AT_A_TIME = threading.RLock()


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with _ONE_AT_A_TIME:
            # torch has no annotations here
            return _sanitizer.cuda_sanitizer.dispatch.__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


class _Lane:
    """A lane's stream that enters the mode in its thread. Events carry the lane's name."""

    records = True

    def __init__(self, inner: Stream, lane: str, deaf_to: str) -> None:
        self.key = inner.key
        self.mark, self.synchronize = inner.mark, inner.synchronize
        self._inner = inner
        self._lane = lane
        self._deaf_to = deaf_to

    @contextmanager
    def current(self) -> Iterator[None]:
        with _Mode(), self._inner.current():  # type: ignore[no-untyped-call]
            yield

    def record(self) -> Event | None:
        event: Any = self._inner.record() if self._inner.records else None
        if event is not None:
            _OF_LANE[event] = self._lane
        return event  # type: ignore[no-any-return]

    def wait(self, event: Event) -> None:
        if _OF_LANE.get(event) != self._deaf_to:
            with _ONE_AT_A_TIME:
                self._inner.wait(event)


_OF_LANE: dict[Any, str] = {}


class _Sanitized:
    def __init__(self, inner: Streams, lane: str, source: str) -> None:
        self.is_async = inner.is_async
        self.here, self.memory, self.origin = inner.here, inner.memory, inner.origin
        self._inner = inner
        self._deaf = {lane: source}

    def stream(self, resource: Resource) -> Stream:
        return _Lane(self._inner.stream(resource), resource.name, self._deaf.get(resource.name, ""))


def main(device: str, lane: str = "", source: str = "") -> None:
    settings = PlainSettings(schema=schema_of(SHAPES["multi-hot"]), device=device, cache_rows=0, kernels="torch")
    with PlainJob(settings) as job:
        job.engine.cache.streams = _Sanitized(job.engine.cache.streams, lane, source)
        result = job.train(batches_of("multi-hot"))
    sys.stdout.write(f"{result.progress.steps} batches\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
