"""Gathers in real processes: models that use parameters where they are not, and a peer that is lost in a pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from bagpipe.dense.parallel.shard_units import find_units
from bagpipe.dense.parallel.sharded import ShardedModel
from bagpipe.distributed.process_groups import TorchPeers
from bagpipe.errors import InputError
from tests.dense.parallel.test_sharded import Wide, gathers_of
from tests.distributed.processes import run_peers

pytestmark = pytest.mark.multiproc


class Borrowing(Wide):
    """Uses a parameter of a layer outside its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.layers[0].weight


class Adding(Wide):
    """Adds a bias of a layer outside its forward: torch does not check that such an operand has memory."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.layers[1].bias)


class Late(Wide):
    """Uses a parameter outside its layer from the second forward on, in a way that torch does not check."""

    turn = 0

    def __init__(self, use: Callable[[nn.Parameter], Tensor]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.turn += 1
        return x if self.turn == 1 else x + self.use(self.layers[1].bias)


class Kept(Wide):
    """Keeps a view of a weight from the beginning, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.view = [self.layers[1].bias.detach()]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.view[0]


class Keeping(nn.Linear):
    """A layer that keeps a view of its bias."""

    view: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.view = self.bias.view(-1)
        return super().forward(x)


class Cached(Wide):
    """Uses the view that a layer keeps of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = Keeping(120, 120)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.layers[2].view


class Shapely(Wide):
    """Asks a parameter outside its layer for what is no value: a good use."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layers[0].weight
        return super().forward(x.to(weight).view(-1, weight.shape[1])) + torch.zeros_like(self.layers[1].bias)


class Giving(nn.Linear):
    """A layer that returns a part of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[:1]


class Given(Wide):
    """Uses what a layer gives when the layer is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.given = Giving(120, 120)

    def forward(self, x: Tensor) -> Tensor:
        given = self.given(x)
        return super().forward(x) + given


class Counting(Wide):
    """Changes a buffer in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


class Repeating(Wide):
    """Calls a layer once more in the second forward."""

    turn = 0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.turn += 1
        return x if self.turn == 1 else self.layers[0](x)


OUTSIDE = "dense.shard parameters: a parameter is used outside the forward of its layer"
VIEW = "dense.shard: something keeps a view of a parameter of layer layers."
LATE: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "itself": lambda bias: bias,
    "to": lambda bias: bias.to(torch.float64),
    "data": lambda bias: bias.data,
    "view": lambda bias: bias.view(-1),
    "detach": lambda bias: bias.detach(),
    "item": lambda bias: torch.tensor(bias[0].item()),
}
MISUSES: dict[str, tuple[Callable[[], Wide], str]] = {
    "borrowing": (Borrowing, OUTSIDE),
    "adding": (Adding, OUTSIDE),
    "given": (Given, OUTSIDE),
    **{f"late {kind}": (partial(Late, use), OUTSIDE) for kind, use in LATE.items()},
    "kept": (Kept, VIEW),
    "cached": (Cached, VIEW),
    "counting": (Counting, "dense.shard: the forward changes the buffer count"),
    "repeating": (Repeating, "dense.shard parameters: layer layers.0 is called 1 times in the first batch and more"),
}


def two_steps(model: Wide, shards: ShardedModel) -> None:
    for _ in range(2):
        with shards.forward():
            loss = model(torch.ones(3, 120)).sum()
        with shards.backward():
            loss.backward()
        shards.reduce()
        shards.clear()


def misuse(peers: TorchPeers) -> dict[str, str]:
    """The line of the error of each misuse, in the first or second step."""
    gathers = gathers_of(peers)
    lines = {}
    for kind, (make, _) in MISUSES.items():
        model = make()
        try:
            with ShardedModel(model, find_units(model), "parameters", sums=peers.dense, gathers=gathers) as shards:
                shards.release_model()
                two_steps(model, shards)
        except InputError as error:
            lines[kind] = str(error)
    return lines


def use_well(peers: TorchPeers) -> None:
    model = Shapely()
    with ShardedModel(model, find_units(model), "parameters", sums=peers.dense, gathers=gathers_of(peers)) as shards:
        shards.release_model()
        two_steps(model, shards)


def test_what_is_no_value_can_be_asked_for() -> None:
    assert [end.error for end in run_peers(2, use_well)] == [None, None]


def test_models_that_cannot_be_divided_so_are_refused() -> None:
    for end in run_peers(2, misuse):
        assert end.error is None
        for kind, (_, line) in MISUSES.items():
            assert end.value.get(kind, "accepted").startswith(line), (kind, end.value.get(kind))


def fail_in_midst(peers: TorchPeers) -> None:
    model = Wide()
    with ShardedModel(model, find_units(model), "parameters", sums=peers.dense, gathers=gathers_of(peers)) as shards:
        shards.release_model()
        if peers.rank == 1:
            raise ValueError("one rank is broken")
        with shards.forward():
            model(torch.ones(3, 120))


def test_a_lost_peer_is_the_error_of_a_pass() -> None:
    first, second = run_peers(2, fail_in_midst)
    assert second.error is not None
    assert second.error[0] == "ValueError"
    assert first.error is not None
    assert "one rank is broken" in first.error[1]
