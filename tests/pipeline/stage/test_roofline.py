from __future__ import annotations

import pytest
import torch

from bagpipe.cluster.model import Device
from bagpipe.errors import InputError
from bagpipe.pipeline.stage.roofline import Roofline

DEVICE = Device(memory_bytes=1e9, memory_bytes_per_s=1e9, flops={"float32": 1e10, "bfloat16": 1e11}, call_s=1e-6)


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


def test_a_product_limited_by_arithmetic():
    one, other = meta(1000, 1000), meta(1000, 1000)
    with Roofline(DEVICE) as found:
        one @ other
    assert found.seconds == pytest.approx(1e-6 + 2e9 / 1e10)
    with Roofline(DEVICE, "bfloat16") as found:
        one @ other
    assert found.seconds == pytest.approx(1e-6 + 2e9 / 1e11)


def test_a_sum_limited_by_memory():
    one, other = meta(1000), meta(1000)
    with Roofline(DEVICE) as found:
        one + other
    assert found.seconds == pytest.approx(1e-6 + 12_000 / 1e9)


def test_views_take_no_time():
    one = meta(10, 20)
    with Roofline(DEVICE) as found:
        one.view(200)[3:]
        one.t()
    assert found.seconds == 0


def test_a_backward_costs_two_products():
    weight, inputs = meta(100, 200).requires_grad_(), meta(300, 200).requires_grad_()
    with Roofline(DEVICE) as forward:
        output = inputs @ weight.t()
    gradient = meta(300, 100)
    with Roofline(DEVICE) as whole:
        output.backward(gradient)
    assert whole.seconds == pytest.approx(2 * forward.seconds, rel=0.05)


def test_real_tensors_are_computed():
    with Roofline(DEVICE) as found:
        total = torch.ones(4) + torch.ones(4)
    assert total.tolist() == [2, 2, 2, 2]
    assert found.seconds > 0


def test_a_device_without_the_rate():
    with (
        pytest.raises(InputError, match="flops of float64: expected one of float32, bfloat16"),
        Roofline(DEVICE, "float64"),
    ):
        meta(2, 2) + meta(2, 2)
