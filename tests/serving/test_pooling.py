from __future__ import annotations

import numpy as np
import pytest
import torch

from bagpipe.errors import InputError
from bagpipe.serving import Bags, pool


def test_bags_are_pooled_as_by_torchs_module() -> None:
    """Empty bags are zero; weights multiply; single ids are bags of one."""
    generator = torch.Generator().manual_seed(1)
    table = torch.rand(9, 4, generator=generator, dtype=torch.float64)
    ids, lengths = np.array([3, 3, 0, 8, 1]), np.array([2, 0, 3])
    weights = np.array([0.5, -1.0, 2.0, 0.0, 3.0], np.float32)
    offsets = torch.tensor([0, 2, 2])
    bags = Bags(ids=ids, lengths=lengths, weights=weights)
    for mode, weighted in (("sum", False), ("mean", False), ("sum", True)):
        found = pool(table[ids], bags, mode, weighted=weighted)
        module = torch.nn.EmbeddingBag.from_pretrained(table, mode=mode)
        own = torch.tensor(weights).double() if weighted else None
        assert torch.allclose(found, module(torch.tensor(ids), offsets, own), rtol=1e-15, atol=0)
        assert not found[1].any()
    plain = Bags(ids=ids, lengths=lengths)
    assert torch.equal(pool(table[ids], plain, "sum", weighted=True), pool(table[ids], plain, "sum"))
    assert torch.equal(pool(table[ids], Bags.of("user", ids), "mean"), table[ids])


def test_bags_that_do_not_fit_are_refused() -> None:
    ids = np.array([1, 2])
    for value, words in (
        (np.array([1.0]), "ids must be int64"),
        (Bags(ids=ids, lengths=np.array([1])), "lengths must add up to its 2 ids"),
        (Bags(ids=ids, lengths=np.array([3, -1])), "lengths must add up"),
        (Bags(ids=ids, lengths=np.array([2]), weights=np.ones(1)), "2 ids need as many weights, got 1"),
    ):
        with pytest.raises(InputError, match=f"feature 'user': .*{words}"):
            Bags.of("user", value)
