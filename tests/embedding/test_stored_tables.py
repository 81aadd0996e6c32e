"""What stands for tables and their weights once rows are in a store."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType

from bagpipe.embedding.model_tables import schema_of
from bagpipe.embedding.torchrec_collections import convert
from bagpipe.errors import InputError

META = torch.device("meta")


def _converted() -> nn.Module:
    bag = EmbeddingBagConfig(
        name="user", embedding_dim=4, num_embeddings=50, feature_names=["u"], pooling=PoolingType.MEAN
    )
    sequence = EmbeddingConfig(name="item", embedding_dim=8, num_embeddings=90, feature_names=["i"])
    model = nn.ModuleDict(
        {
            "bags": EmbeddingBagCollection(tables=[bag], device=META),
            "history": EmbeddingCollection(tables=[sequence], device=META),
        }
    )
    return convert(model, schema_of(model)).model


def test_a_printed_model_shows_its_tables() -> None:
    text = str(_converted())
    assert "(user): 50 x 4, mean, rows in the store" in text
    assert "(item): 90 x 8, rows in the store" in text


@pytest.mark.parametrize(
    ("collection", "folder", "table"), [("bags", "embedding_bags", "user"), ("history", "embeddings", "item")]
)
def test_weights_are_refused_in_the_words_of_who_reads_rows(collection: str, folder: str, table: str) -> None:
    tables = getattr(_converted()[collection], folder)  # type: ignore[index]
    assert list(tables) == [table]
    with pytest.raises(InputError, match=rf"pipeline\.rows\('{table}'\)\[ids\] reads them"):
        _ = tables[table].weight
    with pytest.raises(InputError, match=f"table '{table}' is looked up through its collection"):
        tables[table](torch.tensor([1]))
    other = "embeddings" if folder == "embedding_bags" else "embedding_bags"
    assert not hasattr(_converted()[collection], other)  # type: ignore[index]
