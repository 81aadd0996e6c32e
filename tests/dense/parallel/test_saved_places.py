"""What a graph saves of parameters comes back from other memory, and keeps nothing alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from bagpipe.dense.parallel.saved_places import SavedPlaces
from bagpipe.dense.parallel.shard_units import find_units
from bagpipe.dense.parallel.unit_shard import UnitShard
from bagpipe.errors import InputError


class Copied:
    """A group of one rank, which has what the other one would send."""

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole = whole

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        output.copy_(self._whole)


def test_a_graph_finds_parameters_where_they_are_now() -> None:
    torch.manual_seed(3)
    layer = nn.Linear(5, 4)
    inputs = torch.randn(3, 5, requires_grad=True)
    layer(inputs).tanh().sum().backward()
    assert inputs.grad is not None
    expected, inputs.grad = inputs.grad, None
    (unit,) = find_units(layer)
    shard = UnitShard(unit, level="parameters", rank=0, num_ranks=2)
    whole, places = shard.whole.clone(), SavedPlaces()
    places.arrive(shard)
    with places.saving():
        outputs = layer(inputs).tanh()
    saved = weakref.ref(outputs)
    places.release(shard)
    shard.check_left()
    with pytest.raises(InputError, match="used outside the forward of its layer"):
        outputs.sum().backward(retain_graph=True)
    shard.allocate()
    shard.gather(Copied(whole))  # type: ignore[arg-type]
    places.arrive(shard)
    outputs.sum().backward()
    assert torch.equal(inputs.grad, expected)
    gc.disable()
    try:
        del outputs
        assert saved() is None, "an operator's own result does not keep itself alive"
    finally:
        gc.enable()
