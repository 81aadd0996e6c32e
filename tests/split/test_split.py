"""Stages equal the whole model: all library models, any number of stages, annotations, and refusals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bagpipe.errors import InputError
from bagpipe.split.operators import ModelParts
from bagpipe.split.split import split, split_parts, trace_parts
from bagpipe.split.staged_model import StagedModel
from tests.effort import at_most
from tests.split.whole_models import (
    MODEL_NAMES,
    NUM_DENSE,
    library_model,
    outputs_and_gradients,
    random_batch,
    run_staged,
)


def staged_of(model: nn.Module, stages: object, num_dense: int = NUM_DENSE) -> StagedModel:
    return split(model, stages=stages, num_dense=num_dense, dtype=torch.float64)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: at these sizes more threads cost time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=MODEL_NAMES)
def parts(request: pytest.FixtureRequest) -> ModelParts:
    return trace_parts(library_model(request.param), num_dense=NUM_DENSE, dtype=torch.float64)


def test_chains_of_every_length_equal_the_model_bit_for_bit(parts: ModelParts) -> None:
    model = parts.traced.model
    dense, sparse = random_batch(6)
    outputs, gradients = outputs_and_gradients(model, [model(dense, sparse)])
    for num_stages in range(1, len(parts.operators) + 1):
        staged = split_parts(parts, stages=num_stages)
        assert staged.graph(1).order == tuple(range(num_stages))
        got, got_gradients = outputs_and_gradients(model, run_staged(staged, dense, sparse))
        assert torch.equal(got[0], outputs[0])
        assert got_gradients.keys() == gradients.keys()
        assert all(torch.equal(got_gradients[name], gradients[name]) for name in gradients)


@at_most(30)
@given(data=st.data())
def test_any_assignment_equals_the_model_or_is_refused(parts: ModelParts, data: st.DataObject) -> None:
    """Stages in any order and shape. Only the order of sums at a fork can differ."""
    model = parts.traced.model
    names = [item.name for item in parts.operators]
    num_stages = data.draw(st.integers(2, 4))
    numbers = data.draw(st.lists(st.integers(0, num_stages - 1), min_size=len(names), max_size=len(names)))
    if data.draw(st.booleans()):
        numbers.sort()
    used = {number: place for place, number in enumerate(sorted(set(numbers)))}
    stages = {name: used[number] for name, number in zip(names, numbers, strict=True)}
    try:
        staged = split_parts(parts, stages=stages)
    except InputError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert "cycle" in refusal
        assert numbers != sorted(numbers)
        return
    dense, sparse = random_batch(5)
    outputs, gradients = outputs_and_gradients(model, [model(dense, sparse)])
    got, got_gradients = outputs_and_gradients(model, run_staged(staged, dense, sparse))
    torch.testing.assert_close(got, outputs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got_gradients, gradients, rtol=1e-12, atol=1e-12)


def test_module_names_and_unnamed_operators() -> None:
    staged = staged_of(library_model("dlrm"), {"dense_arch": 0, "inter_arch": 1, "over_arch": 2})
    assert [stage.name for stage in staged.stages] == ["dense_arch", "inter_arch", "over_arch"]
    assert staged.edges == ((0, 1), (1, 2))
    assert staged.embedding_edges == ((0, False), (1, True), (2, False))
    assert {name for stage in range(3) for name, _ in staged.parameters_of(stage)} == {
        name for name, _ in staged.model.named_parameters() if not name.startswith("sparse_arch")
    }
    # An unnamed interaction belongs to the stage of its last input, the bottom tower.
    assert staged_of(library_model("dlrm"), {"dense_arch": 0, "over_arch": 1}).edges == ((0, 1),)


def test_branches_become_parallel_stages() -> None:
    names = {f"branches.{n}": n for n in range(7)} | {"cat_7": 7, "top": 7, "head": 8}
    model = library_model("towers")
    parts = trace_parts(model, num_dense=NUM_DENSE, dtype=torch.float64)
    (join,) = (item.name for item in parts.operators if len(item.inputs) == 7)
    names = {join if name == "cat_7" else name: stage for name, stage in names.items()}
    staged = staged_of(model, names)
    assert staged.edges == (*((n, 7) for n in range(7)), (7, 8))
    assert staged.graph(4).depths == (3,) * 7 + (2, 1)


class TwoHeads(nn.Module):
    """Two tasks on one trunk. The sparse input is used only by collections, of which there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Dropout(0.5))
        self.click = nn.Linear(4, 1)
        self.buy = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        self.unused = nn.Linear(4, 1)

    def forward(self, dense: Tensor, sparse: object) -> tuple[Tensor, Tensor]:
        joint = self.trunk(dense)
        self.unused(joint)
        return self.click(joint), self.buy(joint)


def test_several_outputs_are_heads_and_dropout_is_seen() -> None:
    model = TwoHeads().double()
    staged = staged_of(model, {"trunk": 0, "buy": 1, "click": 2}, num_dense=2)
    assert [[position for position, _ in stage.heads] for stage in staged.stages] == [[], [1], [0]]
    assert [stage.uses_random for stage in staged.stages] == [True, False, False]
    model.eval()
    dense = torch.randn(4, 2, dtype=torch.float64)
    click, buy = run_staged(staged, dense, None)
    assert torch.equal(click, model(dense, None)[0])
    assert torch.equal(buy, model(dense, None)[1])


def test_the_model_is_unchanged() -> None:
    model = library_model("dlrm")
    model.eval()
    modes, names = [m.training for m in model.modules()], set(vars(model))
    state = torch.random.get_rng_state()
    staged = staged_of(model, 2)
    assert [m.training for m in model.modules()] == modes
    assert set(vars(model)) == names
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not staged.stages[0].module.training
    assert all(p.grad is None for p in model.parameters())


class Sizes(nn.Module):
    """Numbers of every kind: a shape used across stages, a constant, a size as a tensor's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(3, 2)
        self.middle = nn.Linear(2, 2)
        self.last = nn.Linear(4, 1)

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        count, width = dense.shape
        hidden = self.second(self.first(dense).view(count, width // 2, -1))
        pairs = self.middle(hidden.reshape(len(hidden) * 2, width // 2)).view(hidden.shape)
        return self.last(pairs.flatten(1)).reshape(dense.size(0)) + dense.new_zeros(count)


def test_numbers_are_recomputed_where_they_are_used() -> None:
    model = Sizes().double()
    for stages in ({"first": 0, "second": 1, "last": 2}, 3, 1):
        staged = staged_of(model, stages, num_dense=4)
        for num_examples in (1, 7):
            dense = torch.randn(num_examples, 4, dtype=torch.float64)
            assert torch.equal(run_staged(staged, dense, None)[0], model(dense, None))


class Gate(nn.Module):
    """Branches on values, so its inside cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.attention = nn.MultiheadAttention(2, 1, dropout=0.5, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        if not bool(hidden.isfinite().all()):
            return hidden
        rows = self.layer(hidden).unsqueeze(1)
        return hidden + self.attention(rows, rows, rows)[0].squeeze(1)  # type: ignore[no-any-return]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.gate = Gate()
        self.last = nn.Linear(2, 1)

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        logits: Tensor = self.last(self.gate(self.first(dense)))
        return logits


def test_modules_that_cannot_be_traced_are_taken_whole_where_they_are_named() -> None:
    model = Gated().double()
    with pytest.raises(InputError, match="model Gated cannot be cut into stages"):
        staged_of(model, 2)
    staged = staged_of(model, {"first": 0, "gate": 1, "last": 1})
    assert [stage.uses_random for stage in staged.stages] == [False, True]
    model.eval()
    dense = torch.randn(4, 3, dtype=torch.float64)
    assert torch.equal(run_staged(staged, dense, None)[0], model(dense, None))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.c = nn.Linear(2, 1)

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        logits: Tensor = self.c(self.b(self.a(dense)))
        return logits


class Returning(nn.Module):
    """a, then b, then a function of a's result again: b alone in a stage would create a cycle."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.ReLU()
        self.c = nn.Linear(2, 1)

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        hidden = self.a(dense)
        logits: Tensor = self.c(self.b(hidden) + hidden * hidden)
        return logits


class InPlace(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 1))

    def forward(self, dense: Tensor, sparse: object) -> Tensor:  # type: ignore[override]
        logits: Tensor = super().forward(dense)
        return logits


class Overwriting(InPlace):
    """Uses a value, then overwrites it."""

    def forward(self, dense: Tensor, sparse: object) -> Tensor:  # type: ignore[override]
        hidden = self[0](dense)
        before = hidden + self[2].bias
        logits: Tensor = self[2](hidden.relu_()) + before
        return logits


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.c = nn.Linear(2, 1)

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        hidden = self.a(dense)
        logits: Tensor = self.c(hidden / len(dense) ** 2)
        return logits


class Tuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 4)
        self.b = nn.Linear(2, 1)

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        left, right = self.a(dense).chunk(2, dim=1)
        logits: Tensor = self.b(left * right)
        return logits


def test_non_tensors_stay_in_their_stage() -> None:
    model = Tuples().double()
    staged = staged_of(model, 2, num_dense=2)
    dense = torch.randn(3, 2, dtype=torch.float64)
    assert torch.equal(run_staged(staged, dense, None)[0], model(dense, None))


@pytest.mark.parametrize(
    ("model", "stages", "words"),
    [
        (Tied(), {"a": 0, "b": 1, "c": 1}, r"parameter 'b.weight' is used in stages 0 \(a\) and 1 \(b\+c\)"),
        (Returning(), {"a": 0, "b": 1, "mul": 0, "c": 0}, "cycle: 0 -> 1 -> 0: a of stage 0 feeds b of stage 1; b of"),
        (InPlace(), {"0": 0, "1": 1, "2": 2}, "1: changes an input of stage 1 in place"),
        (Overwriting(), {"0": 0, "relu_": 0, "add": 1, "2": 1}, "relu_: changes what add takes in place"),
        (Mixing(), 2, "pow.*computes with the number of examples"),
        (
            Tuples(),
            {"a": 0, "chunk": 0, "getitem": 1, "getitem_1": 1, "b": 1},
            "chunk: its result goes to stages .1. but is not a tensor",
        ),
        (Tuples(), {"a": 0, "x": 1}, "stage name 'x' is not in the model; it has a, chunk, getitem, getitem_1, mul, b"),
        (Tuples(), {"a": 0, "b": 2}, r"stage numbers must be 0, 1, … without a gap, got \[0, 2\]"),
        (Tuples(), {"a": 0, "b": 0, "": 1}, "stage name '' is not in the model"),
        (Tuples(), 9, "pipeline.stages must be 1 to 2, the operators of the model's dense part, got 9"),
        (Tuples(), 0, "pipeline.stages must be 1 to 2"),
        (TwoHeads(), {"trunk": 0, "click": 1, "buy": 1, "unused": 2}, "'unused' has no path to a loss"),
        (TwoHeads(), {"trunk": 0, "trunk.0": 1, "trunk.1": 1, "trunk.2": 1, "click": 2, "buy": 2}, "has no operator"),
        (TwoHeads(), {"trunk.7": 0}, "stage name 'trunk.7' is not in the model; it has trunk.0, trunk.1, trunk.2"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(model: nn.Module, stages: object, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        staged_of(model.double(), stages, num_dense=2)
    assert "\n" not in str(caught.value)


def test_the_source_is_no_stage() -> None:
    with pytest.raises(InputError, match="'sparse_arch' belongs to the embedding stage"):
        staged_of(library_model("dlrm"), {"sparse_arch": 0, "over_arch": 1})


def test_costs_move_the_cut() -> None:
    model = library_model("dlrm")
    names = [item.name for item in trace_parts(model, num_dense=NUM_DENSE, dtype=torch.float64).operators]
    costs = dict.fromkeys(names, 0.0) | {names[0]: 1.0, names[1]: 1.0}
    staged = split(model, stages=2, num_dense=NUM_DENSE, dtype=torch.float64, costs=costs)
    assert {name.partition(".weight")[0] for name, _ in staged.parameters_of(0)} >= {names[0]}
    assert names[1] in {name.rpartition(".")[0] for name, _ in staged.parameters_of(1)}
    with pytest.raises(InputError, match="expected one per operator"):
        split(model, stages=2, num_dense=NUM_DENSE, dtype=torch.float64, costs={})
