"""The device of a rank, by its number on its host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagpipe.distributed.membership import Membership
from bagpipe.errors import InputError
from bagpipe.train_pipeline.device import checked_device, device_of_rank

_THIRD = Membership(rank=6, world_size=8, local_rank=2, local_world_size=4)


def test_a_cpu_is_shared() -> None:
    assert device_of_rank("cpu", _THIRD) == torch.device("cpu")


def test_cuda_is_the_device_of_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)  # this host may have fewer
    assert device_of_rank("cuda", _THIRD) == torch.device("cuda:2")
    assert device_of_rank("cuda:1", _THIRD) == torch.device("cuda:1")
    assert device_of_rank("cuda", None) == torch.device("cuda")


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match=r"device is cuda:2, but .* sees 2 CUDA devices, and has LOCAL_RANK 2"):
        device_of_rank("cuda", _THIRD)
    with pytest.raises(InputError, match=r"device is cuda:5, but this process sees 2 CUDA devices$"):
        device_of_rank("cuda:5", None)


@pytest.mark.parametrize("device", ["meta", "gpu", "cpu:x", None, 0.5, "xpu"])
def test_no_device_for_a_model_is_refused_in_one_line(device: Any) -> None:
    with pytest.raises(InputError, match=r"device must be cpu, cuda or cuda:INDEX, got") as caught:
        checked_device(device)
    assert "\n" not in str(caught.value)
    assert checked_device("cpu") == torch.device("cpu")
