"""`open_streams`: the streams of a device, by device type."""

from __future__ import annotations

from collections.abc import Callable

from bagpipe.errors import InputError
from bagpipe.pipeline.stream import NullStreams, Streams

__all__ = ["STREAMS", "open_streams"]


def _open_cuda(device: str) -> Streams:
    from bagpipe.pipeline.cuda_stream import CudaStreams

    return CudaStreams(device)


#: Device type -> function of the device name that returns its streams.
STREAMS: dict[str, Callable[[str], Streams]] = {
    "cpu": lambda device: NullStreams(),
    "cuda": _open_cuda,
}


def open_streams(device: str) -> Streams:
    """The streams of a device, named as in torch: cpu, cuda or cuda:N.

    Raises:
        InputError: unknown device type.
    """
    kind, _, _ = device.partition(":")
    if kind not in STREAMS:
        raise InputError(f"run.device must be {' or '.join(STREAMS)}, got {device!r}")
    return STREAMS[kind](device)
