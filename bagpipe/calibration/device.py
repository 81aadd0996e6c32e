"""`measure_device`: operations, memory bandwidth and time of a call of this machine's processor, by torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from bagpipe.cluster.model import Device
from bagpipe.util.host_memory import free_memory_bytes

__all__ = ["compute_threads", "measure_device"]

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
#: Side of the matrices, bytes of the copied tensor: beyond the caches of most processors.
_SIDE = 1024
_COPY_BYTES = 64 << 20
_ROUNDS = 15


@contextmanager
def compute_threads(threads: int) -> Iterator[None]:
    """A block in which torch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_device(threads: int = 1) -> Device:
    """The processor, as a trainer with so many compute threads uses it. Takes about a second."""
    with compute_threads(threads):
        flops = {name: _flops(dtype) for name, dtype in _DTYPES.items()}
        source, target = torch.ones(_COPY_BYTES // 4), torch.empty(_COPY_BYTES // 4)
        copy_s = _median_s(lambda: target.copy_(source))
        one = torch.ones(1)
        call_s = _median_s(lambda: [torch.add(one, one) for _ in range(100)]) / 100
    return Device(
        memory_bytes=float(free_memory_bytes() or math.inf),
        memory_bytes_per_s=2 * _COPY_BYTES / copy_s,
        flops=flops,
        call_s=call_s,
    )


def _flops(dtype: torch.dtype) -> float:
    one = torch.ones(_SIDE, _SIDE, dtype=dtype)
    return 2 * _SIDE**3 / _median_s(lambda: one @ one)


def _median_s(run: Callable[[], object]) -> float:
    """The median of some rounds in seconds, after one to warm up."""
    run()
    times = []
    for _ in range(_ROUNDS):
        start_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - start_s)
    return sorted(times)[_ROUNDS // 2]
