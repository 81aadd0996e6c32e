"""Triton kernels: conformance under the interpreter, and properties of the code compiled for GPUs.

Compilation needs no GPU: the tests read the PTX and ptxas's register counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

from bagpipe.cache.upload import Uploader
from bagpipe.kernels.interface import Bags, Gradients, RowStep, RowView
from bagpipe.kernels.segment_sum import HostSegmentSum
from bagpipe.kernels.triton_kernels import TritonKernels
from bagpipe.types.schema import RowSchema, RowTable
from tests.kernels.compiled import Compiled, Compiler, usage
from tests.kernels.conformance import OPTIMIZERS, Bench, Case

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def test_under_the_interpreter() -> None:
    """Runs in a separate process; see `interpreted.py`."""
    options = ["-q", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests/kernels/interpreted.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class _Launches(Bench):
    """Records the launches of a case without computing or comparing."""

    def same_bits(self, got: Tensor, expected: Tensor) -> None:
        pass


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


def compiled(cache: Path, capability: int, case: Case) -> list[Compiled]:
    compiler = Compiler(capability)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        _Launches(lambda schema, device: TritonKernels(schema, device, launch=compiler), case, CPU).check()
    return compiler.kernels


@pytest.mark.parametrize(
    ("capability", "case"),
    [
        (90, Case(seed=5, optimizer="adagrad", dtype="float32", dim=48, max_terms=3)),
        *(
            pytest.param(
                capability,
                Case(seed=5, optimizer=optimizer, dtype=dtype, rounding=rounding, dim=dim, max_terms=3),
                marks=pytest.mark.slow,
            )
            for capability in (80, 90)
            for optimizer in OPTIMIZERS
            for dtype, rounding in (
                ("float32", "nearest"),
                ("float64", "nearest"),
                ("float16", "stochastic"),
                ("bfloat16", "stochastic"),
            )
            for dim in (20, 64, 256)
        ),
    ],
    ids=lambda value: f"{value.optimizer}-{value.dtype}-{value.dim}" if isinstance(value, Case) else str(value),
)
def test_code(cache: Path, tmp_path: Path, capability: int, case: Case) -> None:
    """No atomics, no contraction, no inexact operation, no spilled register; rows in accesses of 16 bytes."""
    kernels = compiled(cache, capability, case)
    assert {kernel.name for kernel in kernels} == {"pool_kernel", "sum_kernel", "update_kernel", "initialise_kernel"}
    # 16 bytes: four float32, two float64, eight halves; 8 bytes of halves where the width is no multiple of eight.
    vector = {"float32": "v4", "float64": "v2"}.get(case.dtype, "v[24]")
    for kernel in kernels:
        about = f"{kernel.name} of {sorted(name for name, value in kernel.arguments.items() if value is None)}"
        assert not kernel.count(r"(?:atom|red)\."), f"{about} has atomic operations"
        assert not kernel.count(r"fma\."), f"{about} contracts a product and a sum"
        assert not kernel.count(r"(?:div\.(?:full|approx)|sqrt\.approx)"), f"{about} has operations that are not exact"
        assert not kernel.count(r"\w+(?:\.\w+)*\.ftz"), f"{about} flushes small numbers to zero"
        used = usage(kernel, tmp_path)
        assert used["LOCAL"] == 0, f"{about} spills registers: {used}"
        assert used["STACK"] <= 16, f"{about} spills registers: {used}"  # a float64 division may call a function
        assert used["REG"] <= 96, f"{about} uses {used}"
        assert kernel.count(rf"st\.global\.{vector}\."), f"{about} writes rows in small accesses"
        if kernel.name != "initialise_kernel":
            assert kernel.count(rf"ld\.global\.{vector}\."), f"{about} reads rows in small accesses"


def test_batches_of_all_sizes_take_the_same_kernels(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of rows and terms, step and learning rate are not compile-time constants, so no batch recompiles."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    compiler = Compiler(90)
    kernels = TritonKernels(RowSchema(tables=(RowTable(name="t", dim=48),), optimizer="sgd"), CPU, launch=compiler)
    upload = Uploader(CPU, torch.float32, max_terms=kernels.max_terms)
    records, vectors = torch.zeros(64, 48), torch.zeros(8, 48)
    for step, num_rows in enumerate((1, 16, 33), 1):
        starts = np.append(0, 2000 + 3 * np.arange(num_rows)).astype(np.int32)
        segment_sum = upload.segment_sum(HostSegmentSum(row_starts=starts, sources=np.zeros(starts[-1], np.int32)))
        slots = torch.arange(num_rows)
        kernels.update(
            records,
            slots,
            [Gradients(vectors=vectors, segment_sum=segment_sum)],
            RowStep(lr=0.1 / step, eps=0.0, step=step),
        )
        indices = torch.zeros(num_rows, dtype=torch.int32)
        bags = Bags(indices=indices, offsets=None, factors=None, mean=False)
        kernels.pool(RowView(records=records, slot_index=slots, dim=48), bags)
    different = {(kernel.name, id(kernel.cubin)) for kernel in compiler.kernels}
    # Sums of terms and of partial sums; updates of short rows and of long ones.
    assert Counter(name for name, _ in different) == {"pool_kernel": 1, "sum_kernel": 2, "update_kernel": 2}
