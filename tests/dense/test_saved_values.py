"""What compiled code saves: a backward with other weights than its forward has the values of that forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from bagpipe.dense import compiler as compiled
from bagpipe.dense.compiler import Compiler
from bagpipe.dense.precision import Precision
from bagpipe.dense.saved_values import SavesAll
from bagpipe.dense.stage_module import DenseStage
from bagpipe.dense.versioned_call import CallWeights, versioned_call


class Scaled(nn.Module):
    """Operators that are cheap to compute again, whose derivatives read what they have computed from weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)
        self.scale, self.shift = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.last(torch.sigmoid(self.norm(self.first(x).relu()).relu() * self.scale + self.shift).relu()),)


def gradients(call: Callable[[Tensor, CallWeights], Tensor], module: nn.Module) -> list[Tensor]:
    """Gradients of the input and the parameters, whose backward has other weights."""
    torch.manual_seed(1)
    x, parameters = torch.randn(5, 3).double().requires_grad_(), [*module.parameters()]
    forward, backward = ([torch.randn_like(each) for each in parameters] for _ in range(2))
    weights = CallWeights(parameters=parameters, forward=forward, backward=backward)
    return [*torch.autograd.grad(call(x, weights).square().sum(), [x, *parameters])]


def differences(backend: object, monkeypatch: pytest.MonkeyPatch) -> float:
    """The largest difference to torch's operators, relative to the largest gradient."""
    monkeypatch.setattr(compiled, "BACKEND", backend)
    torch.manual_seed(2)
    inner = Scaled().double()
    stage = DenseStage(inner, Precision(), Compiler(saves_all=True))
    plain = gradients(lambda x, weights: versioned_call(inner, (x,), weights)[0], inner)
    code = gradients(lambda x, weights: versioned_call(stage, (x,), weights)[0], inner)
    size = max(float(each.abs().max()) for each in plain)
    return max(float((one - other).abs().max()) for one, other in zip(plain, code, strict=True)) / size


def divided(partition: Callable[..., object]) -> object:
    """A backend that divides graphs as inductor does, and computes with torch's operators."""
    return aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        partition_fn=partial(partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )


def test_values_are_not_computed_again_with_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    assert differences(divided(SavesAll()), monkeypatch) < 1e-12
    assert differences(divided(min_cut_rematerialization_partition), monkeypatch) > 0.01  # what it is for


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning:torch")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_inductor_saves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert differences("inductor", monkeypatch) < 1e-12
