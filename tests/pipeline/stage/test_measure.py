from __future__ import annotations

import pytest
import torch

from bagpipe.errors import InputError
from bagpipe.partition.operators import Cost, Linear
from bagpipe.pipeline.stage import measure
from bagpipe.pipeline.stage.measure import activation_bytes, operator_graph
from bagpipe.split.split import split, trace_parts
from tests.split.test_split import TwoHeads
from tests.split.whole_models import NUM_DENSE, library_model


def test_measuring_changes_nothing() -> None:
    model = TwoHeads()
    parts = trace_parts(model, num_dense=2, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    operator_graph(parts, examples=(2, 3), repeats=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_an_operator_graph_is_that_of_the_model_with_its_bytes() -> None:
    parts = trace_parts(library_model("dlrm"), num_dense=NUM_DENSE, dtype=torch.float64)
    graph = operator_graph(parts, examples=(2, 8), repeats=1)
    assert [item.name for item in graph.operators] == [item.name for item in parts.operators]
    assert graph.edges[:2] == (
        ("dense_arch.model._mlp.0._linear", "dense_arch.model._mlp.1._linear"),
        ("dense_arch.model._mlp.1._linear", "dense_arch.model._mlp.2._linear"),
    )
    first, last = graph.operators[0], graph.operators[-1]
    assert first.param_bytes == 8 * (NUM_DENSE * 8 + 8)
    assert first.output_bytes == 8 * 8
    assert first.activation_bytes == 8 * 8  # relu keeps its output; the layer keeps only its input
    assert last.output_bytes == 0
    assert first.entering_bytes == 8 * NUM_DENSE
    assert first.linear == Linear(weight_bytes=8 * NUM_DENSE * 8, input_bytes=8 * NUM_DENSE, output_bytes=8 * 8)
    assert all(item.forward.at(8) > 0 and item.backward.at(8) > 0 for item in graph.operators)
    again = type(graph).from_json(graph.to_json())
    assert again.operators == graph.operators
    assert [tuple(edge) for edge in again.edges] == list(graph.edges)


def test_activation_bytes_of_a_stage_include_its_inputs() -> None:
    staged = split(library_model("dlrm"), stages=2, num_dense=NUM_DENSE, dtype=torch.float64)
    state = torch.random.get_rng_state()
    for stage in range(2):
        (kept, inputs), (more, more_inputs) = (activation_bytes(staged, stage, examples) for examples in (4, 8))
        assert 0 < inputs < kept
        assert (more, more_inputs) == (2 * kept, 2 * inputs) or stage == 1, "the last one keeps scalars of its loss too"
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        ((3.0, 5.0), Cost(fixed_s=1.0, per_example_s=1.0)),
        ((5.0, 3.0), Cost(fixed_s=4.0)),
        ((1.0, 3.0), Cost(per_example_s=(1.0 * 2 + 3.0 * 4) / 20)),
    ],
)
def test_fitted_lines_are_not_negative(seconds: tuple[float, float], line: Cost) -> None:
    assert measure._line((2, 4), seconds) == line


def test_operator_times_are_scaled_to_the_total() -> None:
    assert measure._scaled([[1.0, 2.0], [3.0, 6.0]], [2.0, 4.0]) == [[0.5, 1.0], [1.5, 3.0]]


def test_insufficient_sizes_are_refused() -> None:
    parts = trace_parts(TwoHeads(), num_dense=2, dtype=torch.float32)
    with pytest.raises(InputError, match=r"at least two sizes of a micro-batch to measure, got \[4, 4\]"):
        operator_graph(parts, examples=(4, 4))
    with pytest.raises(InputError, match=r"at least 1 example and 1 repeat to measure, got \[0, 1, 10\]"):
        operator_graph(parts, examples=(0, 1))
    with pytest.raises(InputError, match=r"at least 1 example and 1 repeat to measure, got \[1, 2, 0\]"):
        operator_graph(parts, examples=(1, 2), repeats=0)
