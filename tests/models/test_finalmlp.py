"""`FinalMLP` against its formula."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch.nn.functional as F

from bagpipe.errors import InputError
from bagpipe.models.finalmlp import BilinearFusion, FeatureGate, FinalMLP
from tests.models.comparison import Bags, assert_same_step, click_batch
from tests.models.plain_fuxictr import PlainFinalMLP, PlainGate

DIMS = {"a": 3, "b": 3, "c": 5}

#: Of each gate: dense columns, and sparse features with their dimensions.
CONTEXTS: list[tuple[Sequence[int], dict[str, int]]] = [
    ((1, 0), {}),
    ((), {"c": 4}),
    ((1,), {"a": 4, "b": 2}),
    ((), {}),
]


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("contexts", [None, (0, 1), (2, 3)], ids=["no gates", "one kind", "both kinds and none"])
def test_it_equals_the_formula(heads: int, batch_norm: bool, contexts: tuple[int, int] | None) -> None:
    dense, sparse, labels = click_batch(list(DIMS), 2)
    width = 2 * 4 + sum(DIMS.values())
    gates = plain_gates = None
    if contexts is not None:
        chosen = [CONTEXTS[number] for number in contexts]
        one, other = (
            FeatureGate(Bags(dims) if dims else None, columns, dim=4, hidden=(5,), outputs=width)
            for columns, dims in chosen
        )
        gates = one, other
        plain_gates = [
            PlainGate(Bags(dims) if dims else None, columns, dim=4, hidden=(5,), outputs=width)
            for columns, dims in chosen
        ]
    model = FinalMLP(
        Bags(DIMS), num_dense=2, dim=4, hidden=((6,), (5, 9)), heads=heads, batch_norm=batch_norm, gates=gates
    )
    plain = PlainFinalMLP(Bags(DIMS), 2, 4, ((6,), (5, 9)), heads=heads, norm=batch_norm, gates=plain_gates or ())
    assert_same_step(
        model, plain, lambda module: F.binary_cross_entropy_with_logits(module(dense, sparse).squeeze(1), labels)
    )


def test_heads_divide_the_widths() -> None:
    with pytest.raises(InputError, match="4 heads must divide the last widths of both MLPs, got 8, 6"):
        BilinearFusion(8, 6, 4)
