"""LAMB equals its paper's algorithm 2, number by number."""

from __future__ import annotations

import math

import pytest
import torch

from bagpipe.dense.lamb import Lamb


def plain_step(w: list[float], g: list[float], m: list[float], v: list[float], t: int, decay: float) -> None:
    """One step of a layer in plain numbers: lr 0.1, betas 0.8 and 0.95, eps 1e-6."""
    update = []
    for i in range(len(w)):
        m[i] = 0.8 * m[i] + 0.2 * g[i]
        v[i] = 0.95 * v[i] + 0.05 * g[i] ** 2
        r = m[i] / (1 - 0.8**t) / (math.sqrt(v[i] / (1 - 0.95**t)) + 1e-6)
        update.append(r + decay * w[i])
    of_w, of_u = (math.sqrt(math.fsum(x * x for x in xs)) for xs in (w, update))
    ratio = of_w / of_u if of_w and of_u else 1.0
    for i in range(len(w)):
        w[i] -= 0.1 * ratio * update[i]


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_steps_equal_the_paper(decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    layers = [torch.nn.Parameter(torch.randn(n, generator=generator, dtype=torch.float64)) for n in (5, 3)]
    layers.append(torch.nn.Parameter(torch.zeros(4, dtype=torch.float64)))  # a bias: its norm is 0
    plain = [(p.tolist(), [0.0] * len(p), [0.0] * len(p)) for p in layers]
    optimizer = Lamb(layers, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=decay)
    for t in range(1, 8):
        for parameter, (w, m, v) in zip(layers, plain, strict=True):
            parameter.grad = torch.randn(len(parameter), generator=generator, dtype=torch.float64)
            plain_step(w, parameter.grad.tolist(), m, v, t, decay)
        optimizer.step()
        for parameter, (w, m, v) in zip(layers, plain, strict=True):
            state = optimizer.state[parameter]
            for found, expected in ((parameter, w), (state["exp_avg"], m), (state["exp_avg_sq"], v)):
                assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_layer_without_a_gradient_is_left_alone() -> None:
    layer = torch.nn.Parameter(torch.ones(2))
    optimizer = Lamb([layer], lr=0.1)
    optimizer.step()
    assert not optimizer.state
    layer.grad = torch.zeros(2)  # an update of norm 0
    assert optimizer.step(lambda: 7) == 7
    assert layer.tolist() == [1, 1]
