"""`CudaGraphExecutor` with a CPU fake of CUDA graphs: the eager bits, and no side effects of the capture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from bagpipe.dense.executor import EagerExecutor
from bagpipe.dense.loss_scale import LossScale
from bagpipe.dense.precision import Precision
from bagpipe.dense.stage_module import prepared
from bagpipe.errors import InputError
from bagpipe.pipeline.stage.cuda_graph import CudaGraphExecutor
from bagpipe.pipeline.stage.graphs import Recording, Work
from bagpipe.pipeline.stage.recorded_stage import GraphCapture
from bagpipe.testing.repeated_calls import RepeatedCalls
from tests.dense.small import BFLOAT16, SIZES, inputs_of, model_of, train, whole


class Counted(RepeatedCalls):
    """Counts captures."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, *works: Work) -> tuple[Recording, ...]:
        self.recorded += 1
        return super().record(*works)


class CapturedOutputs(RepeatedCalls):
    """Returns the captured tensors themselves, valid for one replay, as a CUDA graph does."""

    def record(self, *works: Work) -> tuple[Recording, ...]:
        return tuple(cast(Recording, SimpleNamespace(outputs=tuple(work()), replay=lambda: None)) for work in works)


class Extended(nn.Module):
    """A model behind a batch norm or a dropout of its dense inputs, with an unused parameter."""

    def __init__(self, inner: nn.Module, first: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.inner = inner
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        logits: Tensor = self.inner(self.first(dense), sparse)
        return logits


def recorded(
    model: nn.Module, precision: Precision | None = None, *, copies: bool = False, graphs: Any = None
) -> CudaGraphExecutor:
    used = precision or Precision()
    staged = prepared(whole(model, used), used)
    capture = GraphCapture(graphs=graphs or RepeatedCalls(), full_batch=SIZES[0])
    return CudaGraphExecutor(staged, used, capture, copies=copies)


@pytest.mark.parametrize(
    ("name", "precision"),
    [("dlrm", BFLOAT16), ("towers", Precision(loss_scale=LossScale(value=64))), ("wide-deep", Precision())],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_replays_give_the_eager_bits(name: str, precision: Precision) -> None:
    model = model_of(name)
    expected = train(model, EagerExecutor(model, precision))
    model = model_of(name)
    losses, state = train(model, recorded(model, precision, copies=name == "towers"))
    assert losses == expected[0]
    assert all(torch.equal(state[key], value) for key, value in expected[1].items())


def test_full_batches_are_captured_once_per_share_and_the_last_never() -> None:
    model, graphs = model_of("dlrm"), Counted()
    work = recorded(model, graphs=graphs)
    train(model, work, (*SIZES, *SIZES))
    assert graphs.recorded == 1
    for share in (6, 5):  # shares of ranks that cannot split a full batch equally
        work.forward(inputs_of(share), SIZES[0], LossScale()).backward()
    assert graphs.recorded == 3


def test_capturing_has_no_side_effects() -> None:
    """Running statistics move once per batch, and unused parameters have no gradient."""
    model = Extended(model_of("dlrm"), nn.BatchNorm1d(3))
    expected = train(model, EagerExecutor(model))[1]
    model = Extended(model_of("dlrm"), nn.BatchNorm1d(3))
    work = recorded(model)
    state = train(model, work)[1]
    assert int(state["first.num_batches_tracked"]) == len(SIZES)
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    work.forward(inputs_of(SIZES[0]), SIZES[0], LossScale()).backward()
    assert model.idle.grad is None


class Offset(nn.Module):
    """Adds the sum of two parameters to its input; both parameters get the same gradient tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, dense: Tensor) -> Tensor:
        return dense + (self.one + self.other)


def test_gradients_have_separate_memory_and_their_parameters_strides() -> None:
    model = Extended(model_of("dlrm"), Offset())
    work = recorded(model, graphs=CapturedOutputs())
    work.forward(inputs_of(SIZES[0]), SIZES[0], LossScale()).backward()
    graded = [p for p in model.parameters() if p.grad is not None]
    assert len(graded) > 2
    assert all(p.grad is not None and p.grad.stride() == p.stride() for p in graded)
    assert len({p.grad.untyped_storage().data_ptr() for p in graded if p.grad is not None}) == len(graded)


@pytest.mark.parametrize("copies", [False, True])
def test_gradients_of_values_outlive_the_next_batch_only_as_copies(copies: bool) -> None:
    model = model_of("dlrm")
    work = recorded(model, copies=copies)
    under_way = cast(Any, work.forward(inputs_of(SIZES[0]), SIZES[0], LossScale()))
    seen: list[Tensor] = []
    next(value for value in under_way.values if value.requires_grad).register_hook(seen.append)
    under_way.backward()
    memory = {tensor.data_ptr() for tensor in under_way.recorded._recorded._first.outputs}
    assert (seen[0].data_ptr() in memory) is not copies


def test_a_model_that_draws_random_numbers_is_refused() -> None:
    with pytest.raises(InputError, match=r"^run.cuda_graph is not possible for a model that draws random numbers"):
        recorded(Extended(model_of("dlrm"), nn.Dropout(0.5)))
