"""The machine and software that a result belongs to."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from bagpipe.store.server.embedded import find_server
from bagpipe.util.machine import processor_name

__all__ = ["TRAINING_PACKAGES", "code_digest", "describe_machine", "load_average", "store_server"]

#: Packages of a training job without its store.
TRAINING_PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "numpy")

_ROOT = Path(__file__).parents[2]
_CODE = ("bagpipe", "cacher", "data", "trainer", "benchmarks")


def describe_machine(packages: Sequence[str]) -> Mapping[str, str]:
    """Processor, system, and the versions of Python and of the installed `packages`."""
    versions = [f"Python {platform.python_version()}"]
    for name in packages:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": f"{processor_name()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}",
        "versions": ", ".join(versions),
    }


def load_average() -> str:
    """Load averages over 1, 5 and 15 minutes."""
    return " ".join(f"{value:.2f}" for value in os.getloadavg())


def store_server(options: argparse.Namespace) -> Mapping[str, str]:
    """The first line that the store server's binary prints for --version: `Benchmark.machine` of one with a store.

    Raises:
        InputError: there is no binary.
    """
    done = subprocess.run([str(find_server()), "--version"], capture_output=True, text=True, check=False)
    return {"server": done.stdout.strip()}


def code_digest() -> str:
    """First 12 hexadecimal digits of SHA-256 over all Python sources. Identifies code that was never committed."""
    hasher = hashlib.sha256()
    for folder in _CODE:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            hasher.update(f"{path.relative_to(_ROOT)}\0".encode())
            hasher.update(path.read_bytes())
    return hasher.hexdigest()[:12]
