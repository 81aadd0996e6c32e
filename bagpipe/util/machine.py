"""Hardware and software of the machine, for reports."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import numpy as np

import bagpipe

__all__ = ["machine_facts", "processor_name", "processor_vendor", "vector_instructions"]

#: Instruction sets for which numerical libraries have kernels of their own.
_VECTOR_INSTRUCTIONS = re.compile(r"(avx|fma|f16c|amx|asimd|sve|sme(?!p)|bf16|i8mm)\w*")


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
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def processor_vendor() -> str:
    """The processor's vendor id; the architecture if the system has none."""
    return _cpuinfo("vendor_id", "CPU implementer") or platform.machine()


def vector_instructions() -> str:
    """Names of the processor's vector instruction sets, sorted; empty if the system does not list them."""
    flags = _cpuinfo("flags", "Features").split()
    return " ".join(sorted({flag for flag in flags if _VECTOR_INSTRUCTIONS.fullmatch(flag)}))


def _cpuinfo(*names: str) -> str:
    """The first value of one of the names in Linux's /proc/cpuinfo; empty if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in fields if name.strip() in names), "")
