"""Inputs of collections: accepted if their ids are among those of the batch, refused otherwise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from bagpipe.cache.row_cache import RowCache
from bagpipe.embedding.torchrec_collections import convert
from bagpipe.errors import InputError, JobError
from bagpipe.types.batch import Batch
from bagpipe.types.schema import RowSchema
from tests.embedding.test_torchrec_collections import BAGS, META, NAMES, SCHEMA, begin, kjt_of, make_batch

from torchrec.modules.embedding_modules import EmbeddingBagCollection  # isort: skip (after bagpipe.embedding.torchrec_collections)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # isort: skip


def _kjt(batch: Batch, **changes: object) -> KeyedJaggedTensor:
    arguments = {
        "keys": list(NAMES),
        "values": torch.from_numpy(batch.values),
        "lengths": torch.from_numpy(batch.lengths).view(-1),
        **changes,
    }
    return KeyedJaggedTensor(**arguments)


def test_parts_and_permutations_of_the_batch_are_the_batch() -> None:
    """A model can split its input and reorder its keys."""
    batch = make_batch()
    converted = convert(EmbeddingBagCollection(BAGS["keys out of batch order"][0], device=META), SCHEMA)
    begin(converted, batch)
    whole = converted.model(kjt_of(batch)).values()
    for order in ([3, 2, 0], [0, 2, 3], [2, 1, 0, 3]):
        assert torch.equal(converted.model(kjt_of(batch).permute(order)).values(), whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: _kjt(b, values=torch.from_numpy(b.values) + 100), r"id 1\d\d for feature 'f\d', which is none of"),
        (
            lambda b: _kjt(b, values=torch.from_numpy(np.append(b.values, 1))),
            "which add up to 41, but 42 ids",
        ),
        (lambda b: _kjt(b, keys=["f0", "f1", "f2", "x"]), r"lacks \['f3'\], and has"),
        (
            lambda b: _kjt(b, keys=list(NAMES)[:2], lengths=torch.from_numpy(b.lengths[:2]).reshape(-1)),
            r"lacks \['f2', 'f3'\]",
        ),
        (
            lambda b: _kjt(b, lengths=torch.from_numpy(b.lengths[:, :-1]).reshape(-1)),
            "20 lengths for 4 keys and 5 examples, which add up to 36, but 41 ids",
        ),
    ],
)
def test_other_inputs_are_refused(change: Callable[[Batch], KeyedJaggedTensor], message: str) -> None:
    batch = make_batch()
    converted = convert(EmbeddingBagCollection(BAGS["keys out of batch order"][0], device=META), SCHEMA)
    begin(converted, batch)
    with pytest.raises(InputError, match=message):
        converted.model(change(batch))


def test_states_that_are_refused() -> None:
    converted = convert(EmbeddingBagCollection(BAGS["weighted"][0], is_weighted=True, device=META), SCHEMA)
    with pytest.raises(JobError, match="rows only while a pipeline computes a batch"):
        converted.model(kjt_of(make_batch()))
    begin(converted, make_batch())
    with pytest.raises(InputError, match="needs weights in its input, got none"):
        converted.model(kjt_of(make_batch()))
    schema = RowSchema(tables=converted.row_tables, optimizer="sgd")
    converted.bind(RowCache(schema, 4))
    with pytest.raises(JobError, match="rows only while a pipeline computes a batch"):
        converted.model(kjt_of(make_batch()))
    with pytest.raises(InputError, match=r"expected a cache for tables \['a', 'b'\], got one for \['a'\]"):
        converted.bind(RowCache(RowSchema(tables=converted.row_tables[:1], optimizer="sgd"), 4))
