from __future__ import annotations

import pytest
import torch

from bagpipe.split.fake_embedding import NUM_IDS, fake_output
from tests.embedding.test_torchrec_collections import bag, seq

from torchrec.modules.embedding_configs import EmbeddingConfig  # isort: skip (after tests.embedding.test_torchrec_collections)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection  # isort: skip
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # isort: skip

CPU = torch.device("cpu")


def ids() -> KeyedJaggedTensor:
    """Two examples, with as many ids per feature as the fake ones."""
    return KeyedJaggedTensor(
        keys=["f0", "f1"],
        values=torch.zeros(4 * NUM_IDS, dtype=torch.int64),
        lengths=torch.full((4,), NUM_IDS),
    )


def test_pooled_fake_tensors_look_like_the_collection_s_output() -> None:
    collection = EmbeddingBagCollection(tables=[bag("a", 4, ["f0", "f1"]), bag("b", 3, ["f1"])], device=CPU)
    blank, real = fake_output(collection, 2, torch.float64, CPU), collection(ids())
    assert (blank.keys(), blank.length_per_key()) == (real.keys(), real.length_per_key())
    assert blank.values().shape == real.values().shape
    assert (blank.values().dtype, blank.values().requires_grad) == (torch.float64, True)


@pytest.mark.parametrize("need_indices", [False, True])
def test_unpooled_fake_tensors_look_like_the_collection_s_output(need_indices: bool) -> None:
    tables: list[EmbeddingConfig] = [seq("a", ["f0"]), seq("b", ["f1"])]
    collection = EmbeddingCollection(tables=tables, device=CPU, need_indices=need_indices)
    blank, real = fake_output(collection, 2, torch.float32, CPU), collection(ids())
    assert list(blank) == list(real)
    for name in real:
        assert blank[name].values().shape == real[name].values().shape
        assert torch.equal(blank[name].lengths(), real[name].lengths())
        assert (blank[name].weights_or_none() is not None) == need_indices
