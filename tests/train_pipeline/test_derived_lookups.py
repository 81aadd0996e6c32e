"""Lookups of ids that the model itself makes: exact if the batch has their rows, refused if it has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torchrec import KeyedJaggedTensor, PoolingType

import bagpipe
from bagpipe.errors import InputError
from bagpipe.optim import Adagrad, RowWiseAdagrad
from tests.effort import costly
from tests.train_pipeline.any_model import AnyModel, CollectionSpec, PlainModel, PlainRows, TableSpec, batches_of
from tests.train_pipeline.plain_loop import PlainLoop, assert_close
from tests.train_pipeline.rank_jobs import SIZES, made, on_ranks, shard, values_of
from tests.train_pipeline.small import (
    EXAMPLES,
    FEATURES,
    ROWS,
    Plain,
    Small,
    assert_same,
    batches,
    pipeline,
    progress_all,
    state_of,
)

#: (ids of a key, examples, generator) -> positions among the ids, and ids per bag.
Pick = Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]]


def _bags(num_ids: int, num_examples: int, generator: torch.Generator) -> Tensor:
    return torch.bincount(torch.randint(num_examples, (num_ids,), generator=generator), minlength=num_examples)


def _permuted(num_ids: int, num_examples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randperm(num_ids, generator=generator), _bags(num_ids, num_examples, generator)


def _fewer(num_ids: int, num_examples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    picked = torch.randperm(num_ids, generator=generator)[: num_ids // 2]
    return picked, _bags(len(picked), num_examples, generator)


def _more(num_ids: int, num_examples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    picked = torch.randint(num_ids, (2 * num_ids,), generator=generator) if num_ids else torch.empty(0).long()
    return picked, _bags(len(picked), 3 * num_examples, generator)


def _none(num_ids: int, num_examples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.empty(0).long(), torch.zeros(num_examples).long()


#: None: the lookup has the ids as they are.
PICKS: tuple[Pick | None, ...] = (_permuted, _fewer, _more, _none, None)


def derived(ids: KeyedJaggedTensor, pick: Pick | None, *, by_offsets: bool = False) -> KeyedJaggedTensor:
    """Other bags of the ids of each key."""
    if pick is None:
        return ids
    generator = torch.Generator().manual_seed(int(ids.values().sum()))
    values, lengths, weights = [], [], []
    for key in reversed(ids.keys()):
        own = ids[key]
        picked, bags = pick(len(own.values()), ids.stride(), generator)
        values.append(own.values()[picked])
        lengths.append(bags)
        weights.append(None if own.weights_or_none() is None else own.weights()[picked])
    all_lengths = torch.cat(lengths)
    offsets = torch.cat([all_lengths.new_zeros(1), all_lengths.cumsum(0)])
    return KeyedJaggedTensor(
        keys=list(reversed(ids.keys())),
        values=torch.cat(values),
        weights=None if weights[0] is None else torch.cat([own for own in weights if own is not None]),
        **({"offsets": offsets} if by_offsets else {"lengths": all_lengths}),
    )


class _Derives:
    """A mixin: adds the means of derived lookups to the vectors of each lookup."""

    picks: tuple[Pick | None, ...] = ()

    def look_up(self, number: int, ids: KeyedJaggedTensor) -> Tensor:
        look_up: Callable[[int, KeyedJaggedTensor], Tensor] = super().look_up  # type: ignore[misc]
        found = [look_up(number, derived(ids, pick, by_offsets=pick is _more)) for pick in self.picks]
        return sum(0.5 * each.mean(0, keepdim=True) if len(each) != ids.stride() else each for each in found)  # type: ignore[return-value]


class Ours(_Derives, AnyModel):
    pass


class Theirs(_Derives, PlainModel):
    pass


OPTIMIZERS = (Adagrad(0.05), RowWiseAdagrad(0.05))


@st.composite
def collections(draw: st.DrawFn) -> list[CollectionSpec]:
    """Collections of each kind, whose tables share features and have several."""
    made = []
    for number, kind in enumerate(("bags", "weighted", "sequences")):
        names = [f"c{number}f{n}" for n in range(3)]
        tables = [
            TableSpec(
                name=f"t{number}_{index}",
                dim=3 if kind == "sequences" else draw(st.integers(2, 3)),
                rows=draw(st.integers(1, 30)),
                features=tuple(draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))),
                pooling=draw(st.sampled_from([PoolingType.SUM, PoolingType.MEAN]))
                if kind == "bags"
                else PoolingType.SUM,
                optimizer=draw(st.sampled_from(OPTIMIZERS)),
            )
            for index in range(draw(st.integers(1, 2)))
        ]
        made.append(CollectionSpec(kind=kind, tables=tuple(tables), key=f"c{number}", examples=5))
    return made


def _of_ours(
    specs: list[CollectionSpec], picks: tuple[Pick | None, ...], data: list[Any], rows: int
) -> dict[str, Tensor]:
    model = Ours(specs)
    model.picks = picks
    with bagpipe.TrainPipeline(
        model,
        torch.optim.SGD([*model.layers.parameters(), model.weight_scale], lr=0.05),
        rows={table.name: table.optimizer for spec in specs for table in spec.tables},
        store="memory://",
        cache_rows=rows,
        lookahead=2,
        planner="inline",
    ) as trained:
        losses = progress_all(trained, iter(data))
        scores = torch.stack(list(trained.evaluate(data[:2])))
        tables = {
            table.name: trained.rows(table.name)[torch.arange(table.rows)] for spec in specs for table in spec.tables
        }
    return {**tables, "losses": torch.stack(losses), "scores": scores, "scale": model.weight_scale.detach()}


def _of_theirs(specs: list[CollectionSpec], picks: tuple[Pick | None, ...], data: list[Any]) -> dict[str, Tensor]:
    model = Theirs(specs)
    model.picks = picks
    dense = torch.optim.SGD([*model.layers.parameters(), model.weight_scale], lr=0.05)
    rows, losses = PlainRows(model), []
    for batch in data:
        model.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        dense.step()
        rows.step()
        losses.append(loss.detach())
    scores = torch.stack([model(batch)[0].detach() for batch in data[:2]])
    tables = {name: held.weight.detach() for name, held in model.tables.items()}
    return {**tables, "losses": torch.stack(losses), "scores": scores, "scale": model.weight_scale.detach()}


@costly(20)
@given(
    collections(),
    st.lists(st.sampled_from(PICKS), min_size=1, max_size=4).map(tuple),
    st.integers(0, 1000),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_other_bags_of_the_batchs_ids_are_exact(
    specs: list[CollectionSpec], picks: tuple[Pick | None, ...], seed: int, dtype: torch.dtype
) -> None:
    """Permuted, fewer, repeated, none, in another number of examples; beside the planned lookup and without it."""
    data = batches_of(specs, 4, seed, dtype=dtype)
    direct = _of_ours(specs, picks, data, 0)
    assert_same(_of_ours(specs, picks, data, 400), direct)
    plain = _of_theirs(specs, picks, data)
    assert direct.keys() == plain.keys()
    for name, value in direct.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-12, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


# ---- a model of which one function makes the lookups -----------------------------------------------------------------

#: (lookup of a KeyedJaggedTensor, ids, number of the batch) -> vectors.
LookUps = Callable[[Callable[[KeyedJaggedTensor], Tensor], KeyedJaggedTensor, int], Tensor]


class SmallBy(Small):
    """Its vectors are those of a function."""

    def __init__(self, look_ups: LookUps) -> None:
        super().__init__()
        self.look_ups = look_ups
        self.seen = 0

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        vectors = self.look_ups(lambda ids: self.bags(ids).values(), batch["ids"], self.seen)
        self.seen += 1
        scores = self.over(vectors).squeeze(-1)
        return (scores - batch["labels"]).square().mean(), scores.detach()


class PlainBy(Plain):
    """The same in plain torch."""

    def __init__(self, look_ups: LookUps) -> None:
        super().__init__()
        self.look_ups = look_ups
        self.seen = 0

    def _vectors(self, ids: KeyedJaggedTensor) -> Tensor:
        by_key = ids.to_dict()
        return torch.cat(
            [self.tables[name](by_key[name].values(), by_key[name].offsets().long()) for name in FEATURES], 1
        )

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        vectors = self.look_ups(self._vectors, batch["ids"], self.seen)
        self.seen += 1
        scores = self.over(vectors).squeeze(-1)
        return (scores - batch["labels"]).square().mean(), scores.detach()


def _reversed(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The examples of each key from the last to the first."""
    values, lengths = [], []
    for key in ids.keys():  # noqa: SIM118 (no mapping)
        own = ids[key]
        bags = torch.split(own.values(), own.lengths().tolist())
        values.extend(reversed(bags))
        lengths.append(own.lengths().flip(0))
    return KeyedJaggedTensor(keys=ids.keys(), values=torch.cat(values), lengths=torch.cat(lengths))


def _late(look_up: Any, ids: KeyedJaggedTensor, seen: int) -> Tensor:
    """A permutation that begins at batch 3."""
    found: Tensor = look_up(_reversed(ids) if seen > 2 else ids)
    return found


def _beside(look_up: Any, ids: KeyedJaggedTensor, seen: int) -> Tensor:
    """In-batch negatives: the same ids, other examples; then the planned lookup again."""
    found: Tensor = look_up(ids) - 0.5 * look_up(_reversed(ids)) + 0.1 * look_up(ids)
    return found


def _first(look_up: Any, ids: KeyedJaggedTensor, seen: int) -> Tensor:
    found: Tensor = look_up(_reversed(ids)) + 0.3 * look_up(ids)
    return found


def _without_gradient(look_up: Any, ids: KeyedJaggedTensor, seen: int) -> Tensor:
    with torch.no_grad():
        target: Tensor = look_up(_reversed(ids))
    found: Tensor = look_up(ids) + target
    return found


def _sometimes(look_up: Any, ids: KeyedJaggedTensor, seen: int) -> Tensor:
    """No lookup at all in batch 2."""
    found: Tensor = look_up(ids) if seen != 2 else torch.zeros(EXAMPLES, 12, dtype=torch.float64)
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("look_ups", [_late, _beside, _first, _without_gradient, _sometimes])
def test_lookups_at_any_time_are_those_of_a_plain_loop(look_ups: LookUps, accumulate: int) -> None:
    data = batches(8, dtype=torch.float64)
    with pipeline(SmallBy(look_ups).double(), accumulate=accumulate, cache_rows=180) as trained:
        losses = progress_all(trained, iter(data))
        state = state_of(trained)
    loop, expected = PlainLoop(PlainBy(look_ups).double()), []
    for first in range(0, len(data), accumulate):
        loop.zero_grad()
        for batch in data[first : first + accumulate]:
            loss, _ = loop.model(batch)
            (loss / accumulate).backward()
            expected.append(loss.detach())
        loop.step()
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=0, atol=1e-12)
    assert_close(state, loop.state())


def test_a_model_that_writes_to_its_input_looks_up_what_it_has_written() -> None:
    """On a CPU the input shares the memory of the planner's ids."""

    def in_place(look_up: Any, ids: KeyedJaggedTensor, seen: int) -> Tensor:
        mine, theirs = ids["f1"].values(), _reversed(ids)["f1"].values()
        if seen > 1:
            mine.data.copy_(theirs)
            ids["f1"].lengths().copy_(ids["f1"].lengths().flip(0).clone())
        found: Tensor = look_up(ids)
        return found

    with pipeline(SmallBy(in_place).double()) as trained:
        losses = progress_all(trained, iter(batches(5, dtype=torch.float64)))
        state = state_of(trained)
    loop, expected = PlainLoop(PlainBy(in_place).double()), []
    for batch in batches(5, dtype=torch.float64):
        loop.zero_grad()
        loss, _ = loop.model(batch)
        loss.backward()
        loop.step()
        expected.append(loss.detach())
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=0, atol=1e-12)
    assert_close(state, loop.state())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_lookups_that_are_computed_again_in_the_backward_train_alike(use_reentrant: bool) -> None:
    def again(look_up: Any, ids: KeyedJaggedTensor, seen: int) -> Tensor:
        factor = torch.ones((), dtype=torch.float64, requires_grad=True)

        def compute(f: Tensor) -> Tensor:
            return torch.tanh(f * _beside(look_up, ids, seen))

        found: Tensor = checkpoint(compute, factor, use_reentrant=use_reentrant)
        return found

    def once(look_up: Any, ids: KeyedJaggedTensor, seen: int) -> Tensor:
        return torch.tanh(_beside(look_up, ids, seen))

    states = []
    for look_ups in (once, again):
        with pipeline(SmallBy(look_ups).double()) as trained:
            progress_all(trained, iter(batches(4, dtype=torch.float64)))
            states.append(state_of(trained))
    assert_close(states[1], states[0], atol=1e-14)


def _masked(look_up: Any, ids: KeyedJaggedTensor, seen: int) -> Tensor:
    """From batch 3 on, an id that no batch has."""
    values = ids.values().clone()
    if seen > 2:
        values[::5] = 59
    found: Tensor = look_up(KeyedJaggedTensor(keys=ids.keys(), values=values, lengths=ids.lengths()))
    return found


def _planned(look_up: Any, ids: KeyedJaggedTensor, seen: int) -> Tensor:
    found: Tensor = look_up(ids)
    return found


def test_an_id_that_the_batch_does_not_have_is_refused_before_anything_changes() -> None:
    data = batches(6, dtype=torch.float64)
    for batch in data:
        batch["ids"].values().clamp_(max=50)
    trained = pipeline(SmallBy(_masked).double(), store="memory://masked")
    iterator = iter(data)
    for _ in range(3):
        trained.progress(iterator)
    with pytest.raises(InputError, match=r"id 59 for feature 'f0', which is none of the batch's \d+ ids .* sparse="):
        trained.progress(iterator)
    trained.close()
    dense = {name: value.detach().clone() for name, value in trained.model.named_parameters()}
    with pipeline(Small().double(), store="memory://masked", existing="rows-only") as again:
        rows = {f"t_{name}": again.rows(f"t_{name}")[torch.arange(ROWS)] for name in FEATURES}
    with pipeline(SmallBy(_planned).double()) as three:
        progress_all(three, iter(data[:3]))
        assert_same({**rows, **dense}, state_of(three))


def _on_rank(rank: int, settings: dict[str, Any]) -> Any:
    with made(SmallBy(_beside).double(), **settings) as trained:
        losses = progress_all(trained, iter(shard(rank, 6)))
        return values_of(state_of(trained)), [float(loss) for loss in losses]


@pytest.mark.multiproc
@pytest.mark.redis
def test_ranks_look_up_other_bags_of_their_own_ids() -> None:
    direct, cached = ([run.value for run in on_ranks(2, _on_rank, {"cache_rows": rows})] for rows in (0, 120))
    loop, expected = PlainLoop(PlainBy(_beside).double()), []
    for parts in zip(shard(0, 6), shard(1, 6), strict=True):
        loop.zero_grad()
        for batch, size in zip(parts, SIZES, strict=True):
            loss, _ = loop.model(batch)
            (loss * size / sum(SIZES)).backward()
            expected.append(float(loss.detach()))
        loop.step()
    for rank in range(2):
        for name, value in loop.state().items():
            np.testing.assert_allclose(direct[rank][0][name], value.numpy(), rtol=0, atol=1e-12)
            assert np.array_equal(direct[rank][0][name], cached[rank][0][name])
        np.testing.assert_allclose(direct[rank][1], expected[rank::2], rtol=0, atol=1e-12)
        assert direct[rank][1] == cached[rank][1]
