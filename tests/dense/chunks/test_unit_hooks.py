from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from bagpipe.dense.chunks.budget import Budget
from bagpipe.dense.chunks.chunked_model import ChunkedModel
from bagpipe.errors import InputError
from bagpipe.pipeline.stream import NullStreams


class Reaching(nn.Module):
    """Uses the weights of a module without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        return values @ self.layer.weight


def reach(values: Tensor, model: nn.Module) -> None:
    chunked = ChunkedModel.of(model, SGD(model.parameters(), lr=0.1), Budget(num_bytes=4096), NullStreams())
    chunked.begin()
    try:
        with chunked.computing():
            loss = model(values).sum()
        loss.backward()
    finally:
        chunked.end()
        chunked.close()


def test_a_parameter_that_is_used_outside_of_its_module_is_refused() -> None:
    for values in (torch.ones(2, 4, requires_grad=True), torch.ones(2, 4)):  # saved for the backward, or not
        with pytest.raises(InputError, match=r"layer\.weight is used outside of the forward"):
            reach(values, Reaching())


class Shifting(Reaching):
    """Adds a weight of a module that it calls too; an addition saves nothing for the backward."""

    def forward(self, values: Tensor) -> Tensor:
        shifted: Tensor = self.layer(values) + self.layer.bias
        return shifted


def test_a_sum_with_a_parameter_of_a_module_that_is_called_too_is_refused() -> None:
    with pytest.raises(InputError, match=r"layer\.bias is used outside of the forward"):
        reach(torch.ones(2, 4), Shifting())


class Asking(Reaching):
    """Asks for what is no element."""

    def forward(self, values: Tensor) -> Tensor:
        weight = self.layer.weight
        found: Tensor = self.layer(values.to(weight.dtype).reshape(-1, weight.shape[1])) * weight.numel()
        return found


def test_dtype_and_shape_may_be_read_anywhere() -> None:
    reach(torch.ones(2, 4), Asking())


class Giving(nn.Module):
    """Returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self) -> Tensor:
        return self.weight.unsqueeze(0)


class Adding(nn.Module):
    """Adds, far from it, what a module gives; an addition saves nothing for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.given = Giving()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, values: Tensor) -> Tensor:
        given: Tensor = self.given()
        for layer in self.layers:
            values = layer(values)
        return values + given


class Recomputing(nn.Module):
    """Computes its layers again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.layers, values, use_reentrant=False)
        return found


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Adding, r"module given returns a part of its parameters"),
        (Recomputing, r"forward of module layers\.0 runs again in the backward"),
    ],
)
def test_parameters_that_are_read_after_their_module_are_refused(kind: type[nn.Module], message: str) -> None:
    model = kind()
    chunked = ChunkedModel.of(model, SGD(model.parameters(), lr=0.1), Budget(num_bytes=4096), NullStreams())
    chunked.begin()
    try:
        with pytest.raises(InputError, match=message):  # noqa: PT012
            with chunked.computing():
                loss = model(torch.ones(2, 4, requires_grad=True)).sum()
            loss.backward()
    finally:
        chunked.end()
        chunked.close()
