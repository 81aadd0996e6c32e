from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from bagpipe.errors import InputError
from bagpipe.split.trace import batch_dependent_modules, function_name, is_collection, is_in_place, trace
from tests.split.whole_models import library_model


class Branching(nn.Module):
    """A forward that branches on a value, which tracing cannot record."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        if dense.sum() > 0:
            return dense
        logits: Tensor = self.layer(dense)
        return logits


class ThreeInputs(nn.Module):
    def forward(self, dense: Tensor, sparse: object, more: Tensor) -> Tensor:
        return dense


class Repeated(nn.Module):
    """A layer called twice, a constant made in forward, and an unused value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        self.unused(dense)
        logits: Tensor = self.layer(torch.relu(self.layer(dense))) + torch.arange(2)
        return logits


def test_paths_are_those_of_modules_and_callers() -> None:
    traced = trace(library_model("dlrm"))
    paths = list(traced.paths.values())
    assert len(set(paths)) == len(paths)
    assert "over_arch.model.1" in paths
    assert "inter_arch.bmm" in paths
    (collection,) = (node for node in traced.graph.nodes if traced.is_collection(node))
    assert traced.paths[collection] == "sparse_arch.embedding_bag_collection"
    assert traced.parameters_of(collection) == {}


def test_a_module_called_twice_has_two_paths_and_dead_code_is_gone() -> None:
    model = Repeated()
    traced = trace(model)
    assert [path for path in traced.paths.values() if path.startswith("layer")] == ["layer", "layer.layer_1"]
    assert traced.dead_paths == ("unused",)
    assert set(vars(model)) == set(vars(Repeated()))
    dense = torch.randn(3, 2)
    assert torch.equal(traced.module(dense, None), model(dense, None))


class Aside(nn.Sequential):
    """Continues with the input of an in-place function instead of its result."""

    def forward(self, dense: Tensor, sparse: object) -> Tensor:  # type: ignore[override]
        hidden = self[0](dense)
        hidden.relu_()
        logits: Tensor = self[1](hidden)
        return logits


def test_a_change_in_place_whose_result_is_not_used_is_refused() -> None:
    """It is not in the graph of the outputs and would be dropped."""
    with pytest.raises(InputError, match=r"^relu_: changes a tensor in place and its result is not used"):
        trace(Aside(nn.Linear(2, 2), nn.Linear(2, 1)))


class Counting(nn.Module):
    """Counts its batches, or draws random numbers without inputs: tracing would do both only once."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.layer = nn.Linear(2, 1)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        if self.counts:
            self.count += 1
            return self.layer(dense)  # type: ignore[no-any-return]
        return self.layer(dense) + torch.rand(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("counts", "words"),
    [(True, "it changes buffer count"), (False, "it draws random numbers that depend on no input")],
)
def test_side_effects_outside_the_graph_are_refused(counts: bool, words: str) -> None:
    model, state = Counting(counts), torch.get_rng_state()
    with pytest.raises(InputError, match=words):
        trace(model)
    assert model.count.item() == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_in_evaluation_is_traced_as_in_training() -> None:
    model = Repeated().eval()
    assert not trace(model).model.training
    assert not model.layer.training


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            Branching(),
            r"model Branching cannot be cut into stages: .*control flow.*; give stages by name, among them the modules",
        ),
        (ThreeInputs(), r"must be called as model\(dense, sparse\), its forward takes \['dense', 'sparse', 'more'\]"),
    ],
)
def test_a_model_that_cannot_be_traced_is_refused_in_one_line(model: nn.Module, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        trace(model)
    assert "\n" not in str(caught.value)


def test_batch_norms_are_named() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Sequential(nn.BatchNorm1d(2), nn.LayerNorm(2))})
    model["c"] = nn.InstanceNorm1d(2)
    assert batch_dependent_modules(model) == ("b.0",)


def test_collections_are_known_by_their_shape() -> None:
    class Bags(nn.Module):
        def embedding_bag_configs(self) -> list[object]:
            return []

    assert is_collection(Bags())
    assert not is_collection(nn.EmbeddingBag(2, 2))


def test_names_and_in_place() -> None:
    graph = fx.Graph()
    taken = graph.placeholder("x")
    nodes = {
        graph.call_method("relu_", (taken,)): ("relu_", True),
        graph.call_method("relu", (taken,)): ("relu", False),
        graph.call_method("__add__", (taken, 1)): ("__add__", False),
        graph.call_function(functional.relu, (taken,), {"inplace": True}): ("relu", True),
        graph.call_function(functional.relu, (taken,), {"inplace": False}): ("relu", False),
        graph.call_function(torch.relu_, (taken,)): ("relu_", True),
        graph.call_function(operator.iadd, (taken, 1)): ("iadd", True),
        graph.call_function(operator.add, (taken, 1)): ("add", False),
    }
    for node, (name, changes) in nodes.items():
        assert (function_name(node), is_in_place(node, None)) == (name, changes)
    called = graph.create_node("call_module", "layer", (taken,))
    assert function_name(called) == ""
    assert is_in_place(called, nn.ReLU(inplace=True))
    assert not is_in_place(called, nn.ReLU())
