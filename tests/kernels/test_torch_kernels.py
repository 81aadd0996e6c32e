"""Torch kernels: conformance, and independence of the block size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from bagpipe.errors import JobError
from bagpipe.kernels.interface import RowStep
from bagpipe.kernels.torch_kernels import TorchKernels
from bagpipe.types.schema import RowSchema, RowTable
from tests.kernels.cases import cases
from tests.kernels.conformance import Bench, Case

CPU = torch.device("cpu")


@settings(max_examples=15)
@given(cases())
def test_conformance(case: Case) -> None:
    Bench(TorchKernels, case, CPU, exact_roots=False).check()


def test_no_gradient_is_an_error() -> None:
    kernels = TorchKernels(RowSchema(tables=(RowTable(name="t", dim=4),), optimizer="sgd"), CPU)
    with pytest.raises(JobError, match="backward did not reach them"):
        kernels.sum([])
    with pytest.raises(JobError, match="backward did not reach them"):
        kernels.update(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), [], RowStep(lr=0.1, eps=1e-8, step=1))
