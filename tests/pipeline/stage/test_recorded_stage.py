"""Replayed forwards and backwards give the bits of operators, in any order of micro-batches, and share no memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bagpipe.errors import InputError
from bagpipe.pipeline.stage.graphs import Recording, Work
from bagpipe.pipeline.stage.recorded_stage import GraphCapture, StageRecordings, check_recordable
from bagpipe.testing.repeated_calls import RepeatedCalls
from tests.effort import costly
from tests.pipeline.stage.walked_recordings import FULL, HandStage
from tests.split.models import MODELS, make


class Counted(RepeatedCalls):
    """Counts what is recorded together."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def record(self, *works: Work) -> tuple[Recording, ...]:
        self.sizes.append(len(works))
        return super().record(*works)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.sampled_from([4, 3])), min_size=1, max_size=10),
    st.booleans(),
)
@costly(20)
def test_micro_batches_in_any_order_have_the_bits_of_operators(
    steps: list[tuple[bool, int, int]], splits: bool
) -> None:
    """A step begins a micro-batch, or ends one of those under way: by B, or by I and W."""
    graphs = Counted()
    stages = plain, replayed = HandStage(None), HandStage(graphs, splits=splits)
    under_way: list[tuple[int, int]] = []
    most: dict[int, int] = {}
    for number, (begins, choice, size) in enumerate(steps):
        if begins or not under_way:
            under_way.append((number, size))
            most[size] = max(most.get(size, 0), sum(other == size for _, other in under_way))
            for stage in stages:
                stage.forward(number, size=size, scale=4)
            continue
        index, _ = under_way.pop(choice % len(under_way))
        for stage in stages:
            if choice % 2:
                stage.backward(index)
            else:
                stage.inputs(index)
                stage.weights(index)
    assert replayed.is_equal(plain)
    assert graphs.sizes == [3 if splits else 2] * sum(most.values()), "as many as are under way at a time"


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("wants", [(True, False), (False, False)])
def test_inputs_without_a_gradient_have_none(wants: tuple[bool, bool], splits: bool) -> None:
    graphs = Counted()
    stages = plain, replayed = HandStage(None), HandStage(graphs, splits=splits)
    for stage in stages:
        stage.forward(0, wants=wants)
        stage.inputs(0)
        stage.weights(0)
    assert replayed.is_equal(plain)
    assert [gradient is not None for gradient in replayed.input_gradients[0]] == [*wants]
    assert replayed.module.idle.grad is None
    assert graphs.sizes == [3 if splits and any(wants) else 2], "nobody waits for an I without inputs"


def test_gradients_of_parameters_are_added_up_apart_from_static_memory() -> None:
    stage = HandStage(RepeatedCalls())
    stage.forward(0)
    stage.backward(0)
    before = [None if gradient is None else gradient.clone() for gradient in stage.gradients]
    stage.forward(1)
    stage.backward(1)
    first, second = stage.module.one.grad, stage.module.other.grad
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr(), "they share a gradient where they are added"
    assert before[0] is not None
    assert not torch.equal(before[0], first)


def test_hooks_take_each_gradient() -> None:
    plain, hooked = HandStage(None), HandStage(RepeatedCalls())
    taken: dict[nn.Parameter, Tensor] = {}

    def take(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        taken[parameter] = taken[parameter] + parameter.grad if parameter in taken else parameter.grad
        parameter.grad = None

    for parameter in hooked.module.parameters():
        parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    for stage in (plain, hooked):
        for index in range(2):
            stage.forward(index)
            stage.backward(index)
    for one, other in zip(plain.module.parameters(), hooked.module.parameters(), strict=True):
        assert other.grad is None
        assert one.grad is None or torch.equal(one.grad, taken[other])


def test_capturing_counts_as_no_change_of_buffers() -> None:
    """`ShardedModel` looks at autograd's count to see whether a forward changes some."""
    layer = nn.Linear(3, 1)
    layer.register_buffer("kept", torch.ones(2))
    version = layer.kept._version
    recordings = StageRecordings(
        GraphCapture(graphs=RepeatedCalls(), full_batch=FULL), lambda given: ((), layer(given[0]).sum(0)), module=layer
    )
    recordings.forward([torch.ones(2, 3)])
    assert layer.kept._version == version


def test_random_numbers_are_refused() -> None:
    for name in MODELS:
        staged = make(name)
        if not any(stage.uses_random for stage in staged.stages):
            check_recordable(staged)
            continue
        with pytest.raises(InputError, match=r"^run.cuda_graph is not possible for a model that draws random numbers"):
            check_recordable(staged)
