"""What does the cache cost on a GPU, and what do its kernels reach? One script, one set of tables.

    python -m benchmarks.gpu.main [--parts kernels steps appetite trace] [--out DIR] [--SIZE NUMBER …]
    python -m benchmarks.gpu.main --rehearse          tiny sizes on the CPU: shows that it runs
    python -m benchmarks.gpu.main --report            tables and README again, from results.json

Writes results.json after every part, then tables.md; with the default folder also the README's tables, unless it was a
rehearsal. Parts that are not measured stay as they are, if they are of this machine and these versions. Exit codes: 0
done; 1 a part failed, the others are there; 2 cannot run here (one line says why).
"""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bagpipe.errors import InputError
from benchmarks.gpu.appetite import run_appetite
from benchmarks.gpu.kernels import run_kernels
from benchmarks.gpu.machine import code_digest, copy_bandwidth, describe, load_average, missing
from benchmarks.gpu.pictures import run_trace
from benchmarks.gpu.report import checks, tables
from benchmarks.gpu.results import Results
from benchmarks.gpu.settings import Settings, parse
from benchmarks.gpu.steps import planned_workload, run_steps
from benchmarks.gpu.workload import Plan, Workload
from benchmarks.readme import fill_in
from trainer.devices import cuda_devices
from trainer.process import settle_device, settle_process

__all__ = ["main"]

_HERE = Path(__file__).parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run and report."""
    try:
        settings, flags = parse(argv)
        folder = flags.out or (_HERE / "rehearsal" if flags.rehearse else _HERE)
        if flags.report:
            results = Results.read(folder / "results.json")
            _report(results, folder)
            return 0
        _check_device(settings.device)
    except InputError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    settle_process()
    settle_device(settings.device, num_ranks=1)
    torch.set_num_threads(1)  # the default of a training job
    torch.set_float32_matmul_precision("highest")  # no TF32, whatever an image says
    if torch.device(settings.device).type == "cuda":
        torch.cuda.set_device(settings.device)  # FBGEMM's kernels go where the process is
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.device(settings.device)
    basis = {"kind": device.type, "rehearsed": flags.rehearse, "machine": dict(describe(device))}
    results, line = Results.on(folder / "results.json", basis)
    if line is not None:
        print(f"gpu: {line}", flush=True)
    failed = _Run(settings, results, folder).measure()
    _report(results, folder)
    for line in checks(results.values):
        print(line)
    return 1 if failed else 0


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


class _Run:
    """The parts, one after the other; what several of them need is made once."""

    def __init__(self, settings: Settings, results: Results, folder: Path) -> None:
        self._settings = settings
        self._results = results
        self._folder = folder
        self._start_s = time.perf_counter()

    def measure(self) -> list[str]:
        """Names of the parts that failed."""
        run = self._run()
        failed = []
        for part in self._settings.parts:
            self._results.begin(part, run)
            start_s, said = time.perf_counter(), None
            try:
                self._parts[part]()
            except Exception as error:  # the other parts' figures are not to be lost
                traceback.print_exc()
                said = f"{type(error).__name__}: {error}"
                failed.append(part)
            self._results.end(part, time.perf_counter() - start_s, said)
        return failed

    def _run(self) -> dict[str, Any]:
        """What every part of this run carries."""
        without = missing()
        for line in (*(f"{name}: {text}" for name, text in self._results.basis["machine"].items()), *without):
            print(line, flush=True)
        rate = copy_bandwidth(torch.device(self._settings.device), self._settings.copy_mib)
        self.say(f"copies within the device: {rate / 1e9:.0f} GB/s read and written")
        return {
            "settings": dataclasses.asdict(self._settings),
            "code": code_digest(),
            "load_average": load_average(),
            "missing": without,
            "copy_bytes_per_s": rate,
        }

    def say(self, line: str) -> None:
        """One line, and when."""
        print(f"[{time.perf_counter() - self._start_s:5.0f} s] {line}", flush=True)

    @cached_property
    def _planned(self) -> tuple[Workload, Plan]:
        return planned_workload(self._settings, self.say)

    def _keep(self, part: str) -> Callable[[Any], None]:
        return lambda value: self._results.put(part, value)

    @property
    def _parts(self) -> dict[str, Callable[[], None]]:
        return {
            "kernels": lambda: run_kernels(self._settings, self.say, self._keep("kernels")),
            "steps": lambda: run_steps(*self._planned, self.say, self._keep("steps")),
            "appetite": lambda: run_appetite(*self._planned, self.say, self._keep("appetite")),
            "trace": lambda: run_trace(*self._planned, self._folder, self.say, self._keep("trace")),
        }


def _report(results: Results, folder: Path) -> None:
    text = tables(results.values)
    (folder / "tables.md").write_text(text, encoding="utf-8")
    print("\n" + text)
    if folder == _HERE and not results.values.get("rehearsed"):
        fill_in(_HERE / "README.md", text)


if __name__ == "__main__":
    sys.exit(main())
