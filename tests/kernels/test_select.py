"""Selection of kernels, and the messages where Triton does not run."""

from __future__ import annotations

import pytest
import torch

from bagpipe.errors import InputError
from bagpipe.kernels import select as module
from bagpipe.kernels.select import TritonSupport, missing_support, select_kernels
from bagpipe.kernels.torch_kernels import TorchKernels
from bagpipe.types.schema import RowSchema, RowTable

SCHEMA = RowSchema(tables=(RowTable(name="t", dim=4),), optimizer="sgd")
CPU = torch.device("cpu")


def found(
    device: str = "cuda",
    capability: tuple[int, int] | None = (9, 0),
    has_triton: bool = True,
    is_interpreted: bool = False,
) -> TritonSupport:
    return TritonSupport(device=device, capability=capability, has_triton=has_triton, is_interpreted=is_interpreted)


@pytest.mark.parametrize(
    ("support", "problem"),
    [
        (found(), None),
        (found(capability=(8, 0)), None),
        (found(capability=(12, 0)), None),
        (found(capability=(7, 5)), "the device has compute capability 7.5, and Triton's kernels need 8.0 or later"),
        (found(has_triton=False), "Triton is not installed"),
        (found("cpu", None), "run.device is cpu, and Triton's kernels need a CUDA device"),
        (found("cpu", None, is_interpreted=True), None),
        (found(is_interpreted=True), "TRITON_INTERPRET=1 is set, and Triton's interpreter is for the CPU"),
    ],
)
def test_where_triton_runs(support: TritonSupport, problem: str | None) -> None:
    assert missing_support(support) == problem


@pytest.mark.parametrize("choice", ["auto", "torch"])
def test_a_cpu_gets_torch_s_and_no_warning(choice: str) -> None:
    assert isinstance(select_kernels(SCHEMA, CPU, choice), TorchKernels)


def test_triton_by_name_where_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InputError, match=r"^run.kernels is triton, but run.device is cpu, and .* need a CUDA device$"):
        select_kernels(SCHEMA, CPU, "triton")


def test_a_failing_test_launch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device claims support but has none, as Triton without a C compiler."""
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    monkeypatch.setattr(module.TritonSupport, "of", lambda device: found())
    with pytest.raises(InputError, match=r"^run.kernels is triton, but a test launch .* failed: \w+: "):
        select_kernels(SCHEMA, CPU, "triton")


def test_an_old_device_gets_torch_s_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of compute capability 7.0 is simulated; no kernel is launched."""
    monkeypatch.setattr(module.TritonSupport, "of", lambda device: found(capability=(7, 0)))
    monkeypatch.setattr(module, "TorchKernels", lambda schema, device: ("torch's", device))
    cuda = torch.device("cuda", 0)
    with pytest.warns(
        UserWarning, match=r"^run.kernels = auto .* slower: the device has compute capability 7.0"
    ) as warned:
        assert select_kernels(SCHEMA, cuda) == ("torch's", cuda)
    assert len(warned) == 1
    with pytest.raises(InputError, match=r"compute capability 7\.0"):
        select_kernels(SCHEMA, cuda, "triton")
