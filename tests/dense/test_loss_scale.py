"""A loss scale changes no bit, and grows as torch's GradScaler does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bagpipe.cache.lookup import LookupGradient
from bagpipe.config.keys import config_keys
from bagpipe.dense.loss_scale import MAX_LOSS_SCALE, LossScale


def test_the_configuration_has_the_same_bound() -> None:
    (key,) = [key for key in config_keys() if key.path == "run.loss_scale"]
    assert key.range is not None
    assert key.range.contains(MAX_LOSS_SCALE)
    assert not key.range.contains(2 * MAX_LOSS_SCALE)


@settings(max_examples=30)
@given(exponent=st.integers(1, 24), seed=st.integers(0, 1000), examples=st.integers(1, 9))
def test_a_scale_divided_out_leaves_the_same_bits(exponent: int, seed: int, examples: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    layers = nn.Sequential(nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 1))
    vectors = torch.randn(examples, 5, generator=draw, requires_grad=True)
    tensors = [vectors, *layers.parameters()]
    found = []
    for scale in (LossScale(), LossScale(value=2**exponent)):
        loss = layers(vectors).square().sum() / examples
        loss.backward(scale.root_gradient(loss))
        scale.unscale_parameters(tensors)
        found.append([tensor.grad for tensor in tensors])
        for tensor in tensors:
            tensor.grad = None
    assert all(torch.equal(plain, scaled) for plain, scaled in zip(*found, strict=True))


def test_gradients_of_rows_are_divided_in_new_memory() -> None:
    """Two groups can share a tensor: in-place division would divide it twice."""
    shared = torch.full((2, 3), 8.0)
    gradients = [LookupGradient(shared, weights, ()) for weights in (None, torch.ones(2))]
    groups = [SimpleNamespace(gradients=[gradient]) for gradient in gradients]
    LossScale(value=4).unscale_rows(cast(Any, groups))
    assert torch.equal(shared, torch.full((2, 3), 8.0))
    assert all(torch.equal(group.gradients[0][0], torch.full((2, 3), 2.0)) for group in groups)
    assert groups[1].gradients[0][1] is not None
    LossScale().unscale_rows(cast(Any, groups))
    assert all(torch.equal(group.gradients[0][0], torch.full((2, 3), 2.0)) for group in groups)


def test_errors_name_a_scale_that_can_be_the_cause() -> None:
    assert LossScale().hint == ""
    assert "run.loss_scale = 4096" in LossScale(value=4096).hint


@settings(max_examples=30)
@given(exponent=st.integers(0, 24), steps=st.integers(1, 4), finite=st.lists(st.booleans(), max_size=40))
def test_growth_equals_grad_scaler_within_bounds(exponent: int, steps: int, finite: list[bool]) -> None:
    scale = LossScale(value=2**exponent, growth_interval=steps)
    value, tracker = torch.tensor(2.0**exponent), torch.tensor(0, dtype=torch.int32)
    for is_finite in finite:
        scale = scale.after(is_finite=is_finite)
        torch._amp_update_scale_(value, tracker, torch.tensor(float(not is_finite)), 2.0, 0.5, steps)
        value.clamp_(1, MAX_LOSS_SCALE)
        assert (scale.value, scale.num_finite) == (int(value), int(tracker))


def test_a_constant_scale_stays() -> None:
    scale = LossScale(value=8)
    assert scale.after(is_finite=False).after(is_finite=True) is scale
    assert scale.carried() == {}
    assert scale.resumed({"loss_scale": 2, "finite_steps": 1}) is scale


def test_a_restored_scale_continues() -> None:
    begun = LossScale(value=8, growth_interval=3)
    later = begun.after(is_finite=False).after(is_finite=True)
    assert later.carried() == {"loss_scale": 4, "finite_steps": 1}
    assert begun.resumed(later.carried()) == later
    assert begun.resumed({"samples": 3}) is begun, "a checkpoint of a job whose scale stayed"
