from __future__ import annotations

import pytest
from torch import nn

from bagpipe.dense.chunks.layout import pack
from bagpipe.dense.chunks.moments import Use
from bagpipe.dense.chunks.units import module_moment, most_chunks, step_moment, units_of
from bagpipe.errors import InputError


class Crossed(nn.Module):
    """Parameters in a list, and a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.ParameterList([nn.Parameter(nn.Linear(2, 2).weight.detach()) for _ in range(2)])
        self.inner = nn.Linear(2, 2)
        self.heads = nn.MultiheadAttention(2, 1)


def numbered(model: nn.Module) -> dict[nn.Parameter, int]:
    return {parameter: number for number, parameter in enumerate(model.parameters())}


def test_units_are_the_modules_whose_forward_uses_parameters() -> None:
    model = Crossed()
    chunks = numbered(model)
    units = {unit.name: {parameter for parameter, chunk in chunks.items() if chunk in unit.chunks}
             for unit in units_of(model, chunks)}  # fmt: skip
    assert units == {
        "": {*model.kernels},
        "inner": {*model.inner.parameters()},
        "heads": {*model.heads.parameters()},
    }


def test_a_forward_inside_another_one_needs_the_chunks_of_both() -> None:
    model = Crossed()
    outer, inner, _ = units_of(model, numbered(model))
    moment = module_moment("forward", [outer, inner])
    assert moment.name == "forward inner"
    assert moment.chunks == {*outer.chunks, *inner.chunks}


def test_a_step_needs_a_chunk_of_every_kind() -> None:
    layout = pack("abc", [256] * 3, chunk_bytes=256, states=["m"])
    assert step_moment(layout, 1).uses == (Use(1, writes=True), Use(4), Use(7, writes=True))


def test_weights_of_two_modules_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    with pytest.raises(InputError, match=r"not possible for 0\.weight, which is 1\.weight too"):
        units_of(model, numbered(model))


def test_the_most_chunks_at_once_are_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sizes = [parameter.nbytes for parameter in model.parameters()]
    layout = pack([name for name, _ in model.named_parameters()], sizes, chunk_bytes=256, states=["m", "v"])
    units = units_of(model, {p: place.chunk for p, place in zip(model.parameters(), layout.places, strict=True)})
    assert most_chunks(layout, units) == (4, "a step of the optimizer")


def test_a_container_is_no_unit() -> None:
    """A graph module keeps the parameters that it reads in plain modules."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.holder = nn.Module()
    model.holder.scale = nn.Parameter(nn.Linear(2, 2).bias.detach())
    assert [unit.name for unit in units_of(model, numbered(model))] == ["0", ""]
