"""The device of these tests: the first CUDA device, or the CPU in a *rehearsal*, which needs no GPU.

A rehearsal shows that the tests run, not that the GPU is right: `make gpu ARGS=--rehearse`. This folder needs only
torch, numpy and pytest, without packages of the development environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

#: Set to 1: run the tests on the CPU, except those that use `cuda`.
REHEARSAL = "BAGPIPE_GPU_REHEARSAL"

_FOLDER = Path(__file__).parent


def rehearses() -> bool:
    return os.environ.get(REHEARSAL) == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all tests without a GPU and without a rehearsal."""
    if torch.cuda.is_available():
        return
    for item in items:
        if _FOLDER not in item.path.parents:
            continue
        if not rehearses():
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device ({REHEARSAL}=1 rehearses on the CPU)"))
        elif torch.version.cuda is not None and "compiled" in item.name:
            # torch 2.11: `torch.compile` in a second thread ends the process, in `_ensureCUDADeviceGuardSet`.
            item.add_marker(pytest.mark.skip(reason="torch's CUDA builds crash here when there is no device"))


@pytest.fixture(autouse=True)
def _as_in_a_job() -> Iterator[None]:
    """One thread, since CPU results depend on the number. No TF32, which some images enable by a variable."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_num_threads(before)


@pytest.fixture
def device() -> Iterator[str]:
    """Device name: the first CUDA device, or the CPU."""
    if rehearses():
        yield "cpu"
        return
    yield "cuda:0"
    torch.cuda.synchronize()


@pytest.fixture
def cuda(device: str) -> str:
    """The device, if it is a CUDA device."""
    if device == "cpu":
        pytest.skip("means nothing on a CPU")
    return device
