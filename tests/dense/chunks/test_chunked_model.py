from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from bagpipe.dense.chunks import chunked_model
from bagpipe.dense.chunks.budget import Budget, Piece
from bagpipe.dense.chunks.chunked_model import ChunkedModel
from bagpipe.dense.versioned_call import CallWeights, versioned_call
from bagpipe.errors import InputError
from bagpipe.pipeline.stream import NullStreams
from tests.dense.chunks.poison import PoisonedArena


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_model, "Arena", PoisonedArena)


class Model(nn.Module):
    """Parameters of its own around modules, one of them used twice, one not at all, and saved views of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 0.7))
        self.kernels = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 3) for _ in range(3)])
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.idle = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.fixed = nn.Linear(8, 8)
        self.fixed.requires_grad_(requires_grad=False)

    def forward(self, values: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[1]):
            values = torch.relu(layer(values)) * self.scale
        for kernel in self.kernels:
            values = values + self.norm(values @ kernel.t())
        found: Tensor = self.fixed(values).sum(1)
        return found


def batches() -> Iterator[Tensor]:
    random = torch.Generator().manual_seed(3)
    for _ in range(6):
        yield torch.randn(5, 8, generator=random)


def train(make: Callable[[list[nn.Parameter]], Optimizer], budget: Budget | None) -> list[Tensor]:
    """Parameters and state after some batches."""
    torch.manual_seed(1)
    model = Model()
    optimizer = make([*model.parameters()])
    if budget is None:
        for values in batches():
            model(values).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        chunked = ChunkedModel.of(model, optimizer, budget, NullStreams())
        chunked.start()
        for values in batches():
            chunked.begin()
            with chunked.computing():
                loss = model(values).square().mean()
            loss.backward()
            assert len(chunked.marks) == len(list(model.parameters())) - 4
            chunked.step(lambda parameters: optimizer.step())
            chunked.finish()
            with torch.no_grad():
                assert torch.isfinite(model(values)).all()
        assert budget.num_bytes == 0 or chunked.arena.peak_bytes <= budget.num_bytes
        plan = chunked.walker.plan
        assert plan is not None
        chunked.end()
        chunked.close()
    state = [value for p in model.parameters() for value in optimizer.state.get(p, {}).values()]
    return [*(p.detach().clone() for p in model.parameters()), *(torch.as_tensor(value) for value in state)]


@pytest.mark.parametrize("chunk_bytes", [256, 512, 4096])
@pytest.mark.parametrize("slots", [4, 7, 100])
def test_training_in_chunks_gives_the_same_bits(chunk_bytes: int, slots: int) -> None:
    def adam(parameters: list[nn.Parameter]) -> Optimizer:
        return Adam(parameters, lr=0.1)

    plain = train(adam, None)
    found = train(adam, Budget(num_bytes=max(slots * chunk_bytes, 9 * 256), chunk_bytes=chunk_bytes))
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))


def test_state_that_appears_late_and_state_on_the_host_give_the_same_bits() -> None:
    def momentum(parameters: list[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=0.001, momentum=0.9)

    plain = train(momentum, None)
    found = train(momentum, Budget(state_on_host=True, chunk_bytes=256))
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))


def test_state_on_the_host_needs_state() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match=r"dense\.state host needs an optimizer .*, got SGD without any"):
        ChunkedModel.of(model, SGD(model.parameters(), lr=0.1), Budget(state_on_host=True), NullStreams())


def ahead(budget: Budget | None, *, is_same: bool) -> list[Tensor]:
    """Parameters after batches with the version before that of the parameters.

    Args:
        budget: of chunks; None: there are none.
        is_same: forward and backward use it; otherwise a forward uses the parameters, and its backward, which follows
            their next step, uses what they were before.
    """
    torch.manual_seed(1)
    model = Model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = Adam(trained, lr=0.1)
    old = [parameter.detach().clone() for parameter in trained]
    chunked = None
    if budget is not None:
        piece = Piece(module=model, parameters=dict(model.named_parameters()), optimizer=optimizer, versions=("old",))
        chunked = ChunkedModel.of_pieces([piece], budget, NullStreams())
        kept = dict(zip(trained, old, strict=True))
        chunked.keep({"old": kept})
        chunked.start()

    def copy(parameters: Sequence[nn.Parameter]) -> None:
        torch._foreach_copy_([kept[each] for each in parameters], [each.detach() for each in parameters])

    pending: Tensor | None = None
    for values in [*batches(), None]:
        if chunked is not None:
            chunked.begin(goes_on=True)
        if pending is not None:
            pending.backward()
        loss = None
        if values is not None and chunked is None:
            weights = CallWeights(parameters=trained, forward=old if is_same else None, backward=old)
            loss = versioned_call(model, (values,), weights)
        elif values is not None and chunked is not None:
            with chunked.computing(), chunked.hooks.versions("old" if is_same else "", "old"):
                loss = model(values)
        pending = None if loss is None else loss.square().mean()
        if is_same and pending is not None:  # before what it used is overwritten
            pending.backward()
            pending = None
        if chunked is not None:
            chunked.write("old", copy, predicts=False)
            chunked.step(lambda parameters: optimizer.step())
            chunked.finish()
        else:
            torch._foreach_copy_(old, [parameter.detach() for parameter in trained])
            optimizer.step()
            optimizer.zero_grad()
    if chunked is not None:
        assert budget is not None
        assert 0 < chunked.arena.peak_bytes <= budget.num_bytes
        chunked.end()
        chunked.close()
    return [parameter.detach().clone() for parameter in (*model.parameters(), *old)]


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("chunk_bytes", [256, 512])
def test_other_weights_than_the_parameters_lie_in_chunks(chunk_bytes: int, is_same: bool) -> None:
    """Of modules with frozen parameters, too."""
    plain = ahead(None, is_same=is_same)
    found = ahead(Budget(num_bytes=9 * 256, chunk_bytes=chunk_bytes), is_same=is_same)
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))
