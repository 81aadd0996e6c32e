"""What does the cache cost on a GPU, and how fast are its kernels?

    python -m benchmarks.gpu.main [--parts kernels steps feed trace] [--out DIR] [--SIZE NUMBER …]
    python -m benchmarks.gpu.main --rehearse          tiny sizes on the CPU: shows that it runs

Parts that are not measured stay in the results, if they are of this machine and these versions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bagpipe.errors import InputError
from benchmarks.gpu.device import copy_bandwidth, device_text, missing
from benchmarks.gpu.feed import run_feed
from benchmarks.gpu.kernels import run_kernels
from benchmarks.gpu.report import tables
from benchmarks.gpu.settings import REHEARSAL, Settings, add_flags
from benchmarks.gpu.steps import planned_workload, run_steps
from benchmarks.gpu.trace import run_trace
from benchmarks.gpu.workload import Plan, Workload
from benchmarks.harness.benchmark import Benchmark, Measure, Part, run_benchmark
from trainer.devices import cuda_devices
from trainer.process import configure_device, configure_process

_HERE = Path(__file__).parent


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    """The process is set up like a training job."""
    settings = Settings.of(options)
    _check_device(settings.device)
    configure_process()
    configure_device(settings.device, num_ranks=1)
    torch.set_num_threads(1)  # the default of a training job
    torch.set_float32_matmul_precision("highest")  # no TF32, whatever an image sets
    if torch.device(settings.device).type == "cuda":
        torch.cuda.set_device(settings.device)  # FBGEMM's kernels run on the current device
    folder = options.out or (_HERE / "rehearsal" if options.rehearse else _HERE)

    @cache
    def planned() -> tuple[Workload, Plan]:
        """Made once for all parts that need it."""
        return planned_workload(settings, lambda line: print(line, flush=True))

    def kernels(part: Part) -> None:
        run_kernels(settings, part.say, part.keep)

    def steps(part: Part) -> None:
        run_steps(*planned(), part.say, part.keep)

    def feed(part: Part) -> None:
        run_feed(*planned(), part.say, part.keep)

    def trace(part: Part) -> None:
        run_trace(*planned(), folder, part.say, part.keep)

    known = {"kernels": kernels, "steps": steps, "feed": feed, "trace": trace}
    return {name: known[name] for name in settings.parts}


def _check_device(device: str) -> None:
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"--device: {str(error).splitlines()[0]}") from None
    if wanted.type == "cpu":
        return
    if wanted.type != "cuda":
        raise InputError(f"--device must be cpu, cuda or cuda:N, got {device}")
    count = cuda_devices()
    if not count:
        raise InputError("no CUDA device here; --rehearse runs tiny sizes on the CPU, --device cpu all of it")
    if (wanted.index or 0) >= count:
        raise InputError(f"--device is {device}, but there are {count} CUDA devices here")


def _machine(options: argparse.Namespace) -> Mapping[str, str]:
    device = torch.device(options.device)
    return {"device type": device.type, "device": device_text(device)}


def _facts(options: argparse.Namespace) -> Mapping[str, Any]:
    rate = copy_bandwidth(torch.device(options.device), options.copy_mib)
    copies = f"copies within the device's memory {rate / 1e9:,.0f} GB/s, bytes read and written"
    return {"copy_bytes_per_s": rate, "notes": [copies, *missing()]}


BENCHMARK = Benchmark(
    folder=_HERE,
    about=__doc__,
    flags=add_flags,
    parts=_parts,
    tables=tables,
    rehearsal=REHEARSAL,
    packages=("torch", "numpy", "triton", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec", "redis"),
    machine=_machine,
    facts=_facts,
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
