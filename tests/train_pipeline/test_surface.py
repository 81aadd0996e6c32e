"""Any model of torchrec's collections trains like plain torch, and with a cache bit for bit as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torchrec import KeyedJaggedTensor, PoolingType

import bagpipe
from bagpipe.errors import InputError
from bagpipe.optim import SGD, Adagrad, Frozen, RowOptimizer, RowWiseAdagrad
from tests.effort import costly
from tests.train_pipeline.any_model import AnyModel, CollectionSpec, PlainModel, PlainRows, TableSpec, batches_of
from tests.train_pipeline.small import Small, assert_same, batches, pipeline, progress_all

OPTIMIZERS: tuple[RowOptimizer, ...] = (SGD(0.1), SGD(0.02), Adagrad(0.05), RowWiseAdagrad(0.05), Frozen())
KINDS = ("bags", "weighted", "sequences")


@st.composite
def collections(draw: st.DrawFn) -> list[CollectionSpec]:
    """Collections that share features and one KeyedJaggedTensor, or have their own, of other numbers of examples."""
    is_shared = draw(st.booleans())
    made = []
    for number in range(draw(st.integers(1, 3))):
        kind, width = draw(st.sampled_from(KINDS)), draw(st.integers(1, 5))
        names = [f"f{i}" if is_shared else f"c{number}f{i}" for i in range(4)]
        tables = []
        for index in range(draw(st.integers(1, 3))):
            features = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
            pooling = PoolingType.SUM if kind == "weighted" else draw(st.sampled_from(PoolingType))
            tables.append(
                TableSpec(
                    name=f"t{number}_{index}",
                    dim=width if kind == "sequences" else draw(st.integers(1, 5)),
                    rows=draw(st.integers(1, 30)),
                    features=tuple(features),
                    pooling=pooling if pooling in (PoolingType.SUM, PoolingType.MEAN) else PoolingType.SUM,
                    optimizer=draw(st.sampled_from(OPTIMIZERS)),
                )
            )
        made.append(
            CollectionSpec(
                kind=kind,
                tables=tuple(tables),
                key="all" if is_shared else f"c{number}",
                examples=5 if is_shared else draw(st.sampled_from([1, 5, 15])),
                calls=draw(st.integers(1, 2)),
            )
        )
    return made


def _unique_rows(specs: list[CollectionSpec], batch: Any) -> int:
    """Rows that a batch looks up."""
    return sum(
        len(torch.cat([batch[spec.key][name].values() for name in table.features]).unique())
        for spec in specs
        for table in spec.tables
    )


def _trained(specs: list[CollectionSpec], data: list[Any], cache_rows: int) -> dict[str, Tensor]:
    model = AnyModel(specs)
    with bagpipe.TrainPipeline(
        model,
        torch.optim.SGD([*model.layers.parameters(), model.weight_scale], lr=0.05),
        rows={table.name: table.optimizer for spec in specs for table in spec.tables},
        store="memory://",
        cache_rows=cache_rows,
        lookahead=2,
        planner="inline",
    ) as trained:
        losses = progress_all(trained, iter(data))
        rows = {
            table.name: trained.rows(table.name)[torch.arange(table.rows)] for spec in specs for table in spec.tables
        }
        dense = {name: value.detach().clone() for name, value in trained.model.named_parameters()}
    return {**rows, **dense, "losses": torch.stack(losses)}


def _plain(specs: list[CollectionSpec], data: list[Any]) -> dict[str, Tensor]:
    model = PlainModel(specs)
    dense = torch.optim.SGD([*model.layers.parameters(), model.weight_scale], lr=0.05)
    rows, losses = PlainRows(model), []
    for batch in data:
        model.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        dense.step()
        rows.step()
        losses.append(loss.detach())
    tables = {name: held.weight.detach() for name, held in model.tables.items()}
    others = {name: value.detach() for name, value in model.named_parameters() if not name.startswith("tables.")}
    return {**tables, **others, "losses": torch.stack(losses)}


def _candidates() -> list[CollectionSpec]:
    """Users, with and without weights and as sequences, beside three candidates for each."""
    return [
        CollectionSpec(
            kind=kind,
            tables=(TableSpec(name=f"t{number}", dim=2, rows=9, features=(f"f{number}",), optimizer=SGD(0.1)),),
            key=f"c{number}",
            examples=examples,
        )
        for number, (kind, examples) in enumerate([("bags", 5), ("bags", 15), ("weighted", 5), ("sequences", 5)])
    ]


@costly(30)
@example(_candidates(), 0, torch.int64)
@given(collections(), st.integers(0, 1000), st.sampled_from([torch.int32, torch.int64]))
def test_any_model_trains_like_plain_torch_and_with_a_cache_as_without(
    specs: list[CollectionSpec], seed: int, dtype: torch.dtype
) -> None:
    data = batches_of(specs, 4, seed, dtype=dtype)
    direct = _trained(specs, data, 0)
    assert_same(_trained(specs, data, max(_unique_rows(specs, batch) for batch in data)), direct)
    plain = _plain(specs, data)
    assert direct.keys() == plain.keys()
    for name, value in direct.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-12, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


class Derived(Small):
    """Derives the input of its collection by a function."""

    def __init__(self, derive: Any) -> None:
        super().__init__()
        self.derive = derive

    def forward(self, batch: Any) -> Any:
        return super().forward({**batch, "ids": self.derive(batch["ids"])})


def _split_and_joined(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    first, second = ids.split([1, 2])
    return KeyedJaggedTensor.concat([second, first])


def test_inputs_derived_in_the_forward_by_reordering_train_alike() -> None:
    states = []
    for derive in (lambda ids: ids, lambda ids: ids.permute([2, 0, 1]), _split_and_joined):
        with pipeline(Derived(derive)) as trained:
            states.append(torch.stack(progress_all(trained, iter(batches(4)))))
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


def _hashed(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=ids.keys(), values=(ids.values() * 7) % 60, lengths=ids.lengths())


def test_ids_made_in_the_forward_are_refused_and_sparse_can_give_them() -> None:
    with pipeline(Derived(_hashed)) as trained, pytest.raises(InputError, match=r"sparse=function"):
        trained.progress(iter(batches(1)))
    with pipeline(Derived(_hashed), sparse=lambda batch: _hashed(batch["ids"])) as trained:
        given_by_function = progress_all(trained, iter(batches(3)))
    hashed_before = [{**batch, "ids": _hashed(batch["ids"])} for batch in batches(3)]
    with pipeline() as trained:
        assert torch.equal(torch.stack(progress_all(trained, iter(hashed_before))), torch.stack(given_by_function))


def test_a_collection_with_two_names_in_a_model_is_one() -> None:
    class Twice(Small):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.bags

        def forward(self, batch: Any) -> Any:
            scores = self.over(self.bags(batch["ids"]).values() + self.again(batch["ids"]).values()).squeeze(-1)
            return (scores - batch["labels"]).square().mean(), scores.detach()

    with pipeline(model := Twice()) as trained:
        progress_all(trained, iter(batches(3)))
        assert model.again is model.bags
