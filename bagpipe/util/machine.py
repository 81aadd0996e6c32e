"""Hardware and software of the machine, for reports."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np

import bagpipe

__all__ = ["machine_facts", "processor_name"]


def machine_facts() -> dict[str, str]:
    """Processor, cores, system and versions: name -> value."""
    return {
        "processor": processor_name(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "bagpipe": bagpipe.__version__,
    }


def processor_name() -> str:
    """The processor's model name; the architecture if the system has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
