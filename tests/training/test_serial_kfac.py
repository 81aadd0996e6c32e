"""K-FAC of stages in one thread: that of one model with all layers, and of owners with their examples alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from bagpipe.dense.precondition.kfac import Kfac, KfacSettings, step_limit
from bagpipe.dense.precondition.layers import linear_layers
from bagpipe.training.serial_kfac import SerialKfac

SETTINGS = KfacSettings(damping=0.1, kappa=0.01, inverse_every=2)
BATCHES = 5


def stages() -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double(), nn.Linear(4, 2).double()]


def examples(batch: int) -> tuple[Tensor, Tensor]:
    """Two parts of a batch, of unlike sizes."""
    generator = torch.Generator().manual_seed(batch)
    first, second = torch.randn(5, 3, generator=generator, dtype=torch.float64).split([2, 3])
    return first, second


def names(modules: Sequence[nn.Module]) -> dict[int, str]:
    return {id(p): f"{n}.{name}" for n, module in enumerate(modules) for name, p in module.named_parameters()}


def step(modules: Sequence[nn.Module]) -> None:
    with torch.no_grad():
        for parameter in (p for module in modules for p in module.parameters()):
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


def train(settings: KfacSettings, *, left_out: int | None = None) -> list[Tensor]:
    """Two ranks hold each stage; rank r has part r of every batch."""
    modules = stages()
    serial = SerialKfac(modules, names(modules), lambda stage: (0, 1), settings)
    for batch in range(BATCHES):
        calls = []
        total = torch.zeros((), dtype=torch.float64)
        for rank, value in enumerate(examples(batch)):
            for number, module in enumerate(modules):
                capture = serial.capture(number, rank, batch)
                assert capture is not None
                value = capture.during(rank, lambda module=module, value=value: module(value))
                calls.append((capture, rank, len(value)))
            total = total + value.square().sum() / 5
        total.backward()  # type: ignore[no-untyped-call]
        is_left_out = batch == left_out
        serial.apply(batch, calls, factor=5.0, lr=0.1, is_left_out=is_left_out)
        if is_left_out:
            for module in modules:
                module.zero_grad(set_to_none=True)
        else:
            step(modules)
    return [parameter.detach() for module in modules for parameter in module.parameters()]


def by_one_model() -> list[Tensor]:
    modules = nn.Sequential(*stages())
    kfac = Kfac(linear_layers(modules), SETTINGS)
    capture = kfac.capture(kfac.layers)
    for batch in range(BATCHES):
        loss = capture.during(0, lambda batch=batch: modules(torch.cat(examples(batch)))).square().sum() / 5
        loss.backward()
        capture.add_inputs(0, batch)
        capture.add_outputs(0, batch, factor=5.0, num_examples=5)
        for layer in kfac.owned:
            kfac.invert(batch, layer)
        kfac.precondition()
        kfac.limit(step_limit(kfac.sizes, kappa=SETTINGS.kappa, lr=0.1))
        step([modules])
    return [parameter.detach() for parameter in modules.parameters()]


def test_summed_factors_are_those_of_the_whole_model() -> None:
    for found, expected in zip(train(SETTINGS), by_one_model(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_local_factors_are_those_of_the_owners_examples() -> None:
    """Rank 0 owns the only layer of each stage, so rank 1's examples enter no factor."""
    local = KfacSettings(damping=0.1, kappa=0.01, inverse_every=2, factors="local")
    modules = stages()
    serial = SerialKfac(modules, names(modules), lambda stage: (0, 1), local)
    assert serial.capture(0, 0, 0) is not None
    assert serial.capture(0, 1, 0) is None


@pytest.mark.parametrize("lag", [0, 1])
def test_a_batch_that_is_left_out_changes_no_factor(lag: int) -> None:
    settings = KfacSettings(damping=0.1, kappa=0.01, inverse_every=1, decay=0.5, lag=lag)
    without = train(settings, left_out=BATCHES - 1)
    assert all(torch.isfinite(parameter).all() for parameter in without)
    assert any(not torch.equal(a, b) for a, b in zip(without, train(settings), strict=True))
