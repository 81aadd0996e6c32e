from __future__ import annotations

import pytest
import torch

from bagpipe.config.sections import ModelConfig
from bagpipe.embedding.torchrec_collections import convert
from bagpipe.errors import InputError
from bagpipe.models.torchrec_models import build_model, num_dense_inputs
from bagpipe.split.assignment import graph_stages, shape_graph
from bagpipe.split.operators import ModelParts
from bagpipe.split.split import split_parts, trace_parts
from bagpipe.types.schema import DataSchema, Feature, Table

SCHEMA = DataSchema(
    label="click",
    dense=("age",),
    features=tuple(Feature(name=f"f{number}", table=f"t{number}") for number in range(7)),
    tables=tuple(Table(name=f"t{number}", rows=50) for number in range(7)),
)


def parts_of(name: str) -> ModelParts:
    torch.manual_seed(0)
    config = ModelConfig(name=name, embedding_dim=4, bottom_mlp=(64, 64, 64), top_mlp=(8,))
    converted = convert(build_model(SCHEMA, config), SCHEMA)
    return trace_parts(converted.model, num_dense=num_dense_inputs(SCHEMA), dtype=torch.float32)


def test_branches_become_side_by_side_stages() -> None:
    parts = parts_of("towers")
    staged = split_parts(parts, stages=graph_stages(parts, 4, microbatches=16))
    assert max(staged.graph(16).depths) < 4


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["dlrm", "deepfm", "towers"])
def test_there_are_as_many_stages_as_asked_for(name: str, num_stages: int) -> None:
    parts = parts_of(name)
    names = graph_stages(parts, num_stages, microbatches=4)
    assert set(names.values()) == set(range(num_stages))
    assert set(names) == {item.name for item in parts.operators}
    assert len(split_parts(parts, stages=names).stages) == num_stages


def test_costs_are_the_same_in_every_process() -> None:
    assert shape_graph(parts_of("dcnv2")) == shape_graph(parts_of("dcnv2"))


def test_too_many_stages_are_refused() -> None:
    parts = parts_of("deepfm")
    with pytest.raises(
        InputError, match=r"pipeline.stages must be 1 to \d+, the operators of the model's dense part, got 99"
    ):
        graph_stages(parts, 99, microbatches=2)
