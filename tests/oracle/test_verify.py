"""Mutation test of the plan checker: it detects every perturbed array, over all fields of all records."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from bagpipe.oracle.expiry import ExpiryRules
from bagpipe.oracle.plan import CachePlan, ConsumerPlan, ExchangePlan, FeatureRef, OracleSpec, OwnerPlan, RowList
from bagpipe.oracle.planner import plan_batches
from bagpipe.oracle.verify import PlanError, Verifier, _rows_of, verify
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema, Feature, Table
from tests.oracle.batches import make_batch, with_lives

CACHED = OracleSpec(
    table_rows=(None, None),
    features=(FeatureRef(feature=0, table=0), FeatureRef(feature=1, table=1)),
    num_slots=15,
    lookahead=3,
)
SPECS = {
    "one rank": CACHED,
    "three ranks": dataclasses.replace(CACHED, num_slots=5, world_size=3),
    "locality": dataclasses.replace(CACHED, num_slots=5, world_size=3, assign="locality"),
    "shares": dataclasses.replace(CACHED, num_slots=7, world_size=3, example_shares=(1, 0, 2)),
    "blind": dataclasses.replace(CACHED, num_slots=7, world_size=2, lookahead=1),
    "drop-unused": dataclasses.replace(CACHED, num_slots=7, world_size=2, policy="drop-unused"),
    "direct": dataclasses.replace(CACHED, num_slots=0, world_size=3),
    "own": dataclasses.replace(CACHED, num_slots=5, world_size=3, assign="own"),
    "expiring": dataclasses.replace(CACHED, num_slots=8, world_size=2),
}
#: Batches whose plans are perturbed, including the last one: some errors show only at the end of a run.
POSITIONS = (4, 9, 11)

RECORDS = {"consumers": ConsumerPlan, "owners": OwnerPlan, "exchanges": ExchangePlan}
ARRAYS = [
    (records, field.name)
    for records, record in RECORDS.items()
    for field in dataclasses.fields(record)
    if field.type != "int"
]
NUMBERS = [(name, step) for name in ("evict_after", "evict_waiting", "fetch_after", "num_slots") for step in (-1, 1)]


@dataclasses.dataclass(frozen=True)
class Run:
    """A planned run, and copies of the checker before each batch."""

    planned: list[tuple[Batch, CachePlan]]
    judges: list[Verifier]

    def catches(self, position: int, mutant: CachePlan) -> bool:
        judge = copy.deepcopy(self.judges[position])
        plans = [mutant, *(plan for _, plan in self.planned[position + 1 :])]
        try:
            for (batch, _), plan in zip(self.planned[position:], plans, strict=True):
                judge.check(batch, plan)
            judge.finish()
        except PlanError:
            return True
        return False


@cache
def run_of(name: str) -> Run:
    rng = np.random.default_rng(3)
    sizes = [6] * 11 + [4]  # the last batch is smaller
    batches = [
        dataclasses.replace(
            make_batch(i, [rng.integers(0, 10, (size, 1)).tolist()] * 2), rank_examples=(size - 3 - i % 2, 3, i % 2)
        )
        for i, size in enumerate(sizes)
    ]
    if name == "expiring":
        schema = DataSchema(
            label="label",
            dense=(),
            features=(Feature(name="x", table="a"), Feature(name="y", table="b")),
            tables=(Table(name="a"), Table(name="b")),
        )
        batches = with_lives(schema, ExpiryRules(limits={"a": 3}, unit="steps"), batches)
    planned = list(plan_batches(batches, SPECS[name]))
    judge, judges = Verifier(SPECS[name]), []
    for batch, plan in planned:
        judges.append(copy.deepcopy(judge))
        judge.check(batch, plan)
    judge.finish()
    return Run(planned, judges)


def mutants(array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Arrays with one element changed, swapped with a neighbour, dropped or doubled."""
    for place in range(len(array)):
        if array.dtype == np.bool_:
            changed = array.copy()
            changed[place] = not changed[place]
            yield f"[{place}] flipped", changed
        else:
            for step in (-1, 1):
                changed = array.copy()
                changed[place] = (int(changed[place]) + step) % (1 << 16 if array.dtype == np.uint16 else 1 << 31)
                yield f"[{place}] {step:+}", changed
        yield f"[{place}] dropped", np.delete(array, place)
        yield f"[{place}] doubled", np.insert(array, place, array[place])
        if place and array[place] != array[place - 1]:
            swapped = array.copy()
            swapped[[place - 1, place]] = swapped[[place, place - 1]]
            yield f"[{place}] swapped", swapped


def mutants_of_field(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, RowList):
        for part in ("table_offsets", "ids"):
            for what, array in mutants(getattr(value, part)):
                yield f".{part}{what}", dataclasses.replace(value, **{part: array})
    elif value is not None:
        yield from mutants(value)


def mutated_plans(name: str, position: int, records: str, field: str) -> Iterator[tuple[str, CachePlan]]:
    plan = run_of(name).planned[position][1]
    for rank, record in enumerate(getattr(plan, records)):
        for what, value in mutants_of_field(getattr(record, field)):
            if (
                name != "expiring"
                and field == "fetch_new"
                and what.endswith("flipped")
                and not np.any(value > getattr(record, field))
            ):
                continue  # reading a row that is known to be new is unnecessary but valid
            changed = list(getattr(plan, records))
            changed[rank] = dataclasses.replace(record, **{field: value})
            yield f"rank {rank}, {field}{what}", replaced(plan, records, changed)


def replaced(plan: CachePlan, field: str, value: list[Any]) -> CachePlan:
    return dataclasses.replace(plan, **{field: tuple(value)})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SPECS)
def test_an_unperturbed_run_passes(name: str) -> None:
    assert verify(run_of(name).planned, SPECS[name]).num_batches == 12


def mutations() -> Iterator[Any]:
    """Every array of every run in each of the batches; by default of every other run, in one of them.

    With shares all batches are default: its owners move no row in some of them.
    """
    for (turn, name), (number, (records, field)) in itertools.product(enumerate(SPECS), enumerate(ARRAYS)):
        for place, position in enumerate(POSITIONS):
            default = name == "shares" or (turn + number) % (2 * len(POSITIONS)) == 2 * place
            yield pytest.param(name, records, field, position, marks=() if default else pytest.mark.slow)


@pytest.mark.parametrize(("name", "records", "field", "position"), list(mutations()))
def test_every_perturbed_array_is_caught(name: str, records: str, field: str, position: int) -> None:
    count, missed = 0, []
    for what, mutant in mutated_plans(name, position, records, field):
        count += 1
        if not run_of(name).catches(position, mutant):
            missed.append(what)
    assert not missed
    empty = (records == "exchanges" and SPECS[name].world_size == 1) or (records == "owners" and name == "shares")
    assert count or empty or field.startswith("expired")


@pytest.mark.parametrize("field", ["expired", "expired_slots", "fetch_new"])
def test_every_perturbed_expiry_is_caught(field: str) -> None:
    count = 0
    for position in range(12):
        for what, mutant in mutated_plans("expiring", position, "owners", field):
            count += 1
            assert run_of("expiring").catches(position, mutant), f"batch {position}, {what}"
    assert count


@pytest.mark.parametrize(("field", "step"), NUMBERS)
@pytest.mark.parametrize("name", SPECS)
def test_every_perturbed_wait_is_caught(name: str, field: str, step: int) -> None:
    run = run_of(name)
    caught = 0
    for position, (_, plan) in enumerate(run.planned):
        for rank, owner in enumerate(plan.owners):
            changed = list(plan.owners)
            changed[rank] = dataclasses.replace(owner, **{field: getattr(owner, field) + step})
            is_caught = run.catches(position, replaced(plan, "owners", changed))
            # A wait can be longer than needed, if no moved row was used or evicted that late.
            assert is_caught or (step < 0 and field in ("evict_after", "fetch_after")), f"batch {position}, rank {rank}"
            caught += is_caught
    assert caught


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.world_size > 1])
def test_every_perturbed_assignment_is_caught(name: str) -> None:
    run = run_of(name)
    for position in POSITIONS:
        plan = run.planned[position][1]
        for rank, examples in enumerate(plan.examples):
            for what, array in mutants(examples):
                changed = list(plan.examples)
                changed[rank] = array
                assert run.catches(position, replaced(plan, "examples", changed)), f"rank {rank} {what}"


@pytest.mark.parametrize("records", [*RECORDS, "examples"])
def test_a_missing_or_doubled_record_is_caught(records: str) -> None:
    run = run_of("three ranks")
    plan = run.planned[4][1]
    parts = list(getattr(plan, records))
    for changed in (parts[1:], [*parts, parts[0]], [parts[1], parts[0], *parts[2:]]):
        assert run.catches(4, replaced(plan, records, changed))


def test_a_batch_out_of_order_is_caught() -> None:
    planned = run_of("one rank").planned
    with pytest.raises(PlanError, match="expected batch 0"):
        verify(planned[1:], CACHED)


def test_the_message_names_the_batch_the_rule_and_the_row() -> None:
    run = run_of("three ranks")
    _, plan = run.planned[9]
    exchange = dataclasses.replace(plan.exchanges[1], pull_now=np.zeros_like(plan.exchanges[1].pull_now))
    mutant = replaced(plan, "exchanges", [plan.exchanges[0], exchange, plan.exchanges[2]])
    judge = copy.deepcopy(run.judges[9])
    with pytest.raises(
        PlanError, match=r"batch 9: rank 1 pulls \(0, \d+\) before its last update: version \d+ instead"
    ):
        judge.check(run.planned[9][0], mutant)


def test_rows_as_pairs() -> None:
    assert _rows_of(RowList(table_offsets=np.array([0, 1, 1, 3]), ids=np.array([7, 8, 9]))) == [(0, 7), (2, 8), (2, 9)]
