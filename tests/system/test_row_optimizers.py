"""Jobs whose tables have optimizers and learning rates of their own, or none, against a loop of torch's own parts."""

from __future__ import annotations

import uuid
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.optim import SGD, Adagrad, Adam, AdamW, Frozen, Ftrl, Momentum, RowOptimizer, RowWiseAdagrad
from bagpipe.store.memory.store import MemoryStore
from bagpipe.testing.plain_job import PlainJob, plan_rank_batches
from bagpipe.training.engine import Engine, EngineSettings
from tests.effort import costly, some_of
from tests.system.jobs import change, largest_batch
from tests.system.optimizer_jobs import (
    CACHE_ROWS,
    DIM,
    NAMES,
    NUM_BATCHES,
    batches,
    plain_loop,
    same_as,
    settings_for,
    train_ranks,
)
from tests.system.staging import assert_equal_numbers, run_staged, staged
from tests.system.test_exactness import MakeConfig

rates = st.sampled_from([0.05, 0.2, lambda step: 0.3 / (1 + step), lambda step: 0.0 if step % 2 else 0.1])
epsilons = st.sampled_from([1e-6, 1e-2])
row_optimizers = st.one_of(
    st.just(Frozen()),
    st.builds(SGD, rates),
    st.builds(Adagrad, rates, eps=epsilons),
    st.builds(RowWiseAdagrad, rates, eps=epsilons),
    st.builds(Adam, rates, eps=epsilons),
    st.builds(Momentum, rates, momentum=st.sampled_from([0.0, 0.9])),
    st.builds(Ftrl, st.sampled_from([0.05, 0.5]), l1=st.sampled_from([0.0, 0.01]), l2=st.sampled_from([0.0, 0.1])),
)
decays = st.sampled_from([0.5, 2.0])
kinds = st.booleans()
decaying = st.one_of(
    st.builds(SGD, rates, weight_decay=decays, decoupled=kinds),
    st.builds(Adagrad, rates, eps=epsilons, weight_decay=decays, decoupled=kinds),
    st.builds(RowWiseAdagrad, rates, eps=epsilons, weight_decay=decays, decoupled=kinds),
    st.builds(Adam, rates, eps=epsilons, weight_decay=decays, decoupled=kinds),
    st.builds(AdamW, rates, eps=epsilons, weight_decay=decays),
    st.builds(Momentum, rates, weight_decay=decays, decoupled=kinds),
)

with_decay = st.fixed_dictionaries(dict.fromkeys(NAMES, decaying | row_optimizers))
by_table = st.fixed_dictionaries(dict.fromkeys(NAMES, row_optimizers))


@costly(15)
@given(rows=by_table, seed=st.integers(0, 1000))
def test_a_job_equals_torch_s_optimizers(rows: dict[str, RowOptimizer], seed: int) -> None:
    """Cached and direct: the same bits. The first rows to leave the small cache come back from the store."""
    data = batches(seed)
    expected = plain_loop(rows, data)
    ends = set()
    for cache_rows in (0, CACHE_ROWS):
        with PlainJob(settings_for(rows, cache_rows=cache_rows)) as job:
            job.train(data)
            logits, _ = job.score(data[:1])
            ends.add((job.digests(), logits.numpy().tobytes()))
            same_as(expected, job, logits)
    assert len(ends) == 1


@costly(6)
@given(rows=with_decay, seed=st.integers(0, 1000))
def test_rows_that_decay_when_they_are_used_equal_rows_that_decay_at_every_step(
    rows: dict[str, RowOptimizer], seed: int
) -> None:
    """In training, where they are at rest, and in evaluation; cached and direct: the same bits."""
    test_a_job_equals_torch_s_optimizers.hypothesis.inner_test(rows, seed)  # type: ignore[attr-defined]


@settings(max_examples=3)
@given(rows=with_decay, seed=st.integers(0, 1000))
def test_two_ranks_with_rows_that_decay(rows: dict[str, RowOptimizer], seed: int) -> None:
    """Equal to eager decay, and cached to direct."""
    data = batches(seed)
    expected = plain_loop(rows, data)
    for cache_rows in (0, CACHE_ROWS):
        train_ranks(rows, data, 2, check=lambda job: same_as(expected, job), cache_rows=cache_rows)


@costly(8)
@given(rows=by_table, seed=st.integers(0, 1000))
def test_two_ranks_equal_torch_s_optimizers(rows: dict[str, RowOptimizer], seed: int) -> None:
    data = batches(seed)
    expected = plain_loop(rows, data)
    train_ranks(rows, data, 2, check=lambda job: same_as(expected, job))


half_types = st.sampled_from(["float16", "bfloat16"])
dtypes_by_table = st.fixed_dictionaries(dict.fromkeys(NAMES, st.sampled_from(["float32", "float16", "bfloat16"])))


@costly(16)
@given(rows=by_table, dtype=half_types | dtypes_by_table)
def test_cached_half_rows_have_the_bits_of_direct_ones(
    rows: dict[str, RowOptimizer], dtype: str | dict[str, str]
) -> None:
    """Of all tables, or beside rows of other dtypes."""
    ends = set()
    for cache_rows in (0, CACHE_ROWS):
        with PlainJob(settings_for(rows, dtype="float32", row_dtype=dtype, cache_rows=cache_rows)) as job:
            job.train(batches())
            ends.add(job.digests())
    assert len(ends) == 1


@costly(6)
@given(rows=by_table, dtype=dtypes_by_table, seed=st.integers(0, 1000))
def test_cached_rows_of_several_dtypes_on_two_ranks_have_the_bits_of_direct_ones(
    rows: dict[str, RowOptimizer], dtype: dict[str, str], seed: int
) -> None:
    ends: set[object] = set()
    for cache_rows in (0, CACHE_ROWS):
        train_ranks(
            rows,
            batches(seed),
            2,
            check=lambda job: ends.add(job.digests()),
            dtype="float32",
            row_dtype=dtype,
            cache_rows=cache_rows,
        )
    assert len(ends) == 1


def test_a_table_in_halves_is_the_only_one_whose_record_is_shorter() -> None:
    rows = {"*": Adam(0.1)}
    with PlainJob(settings_for(rows, dtype="float32", row_dtype={"c": "bfloat16"})) as job:
        job.train(batches())
        sizes = {table.name: job.rows.row_bytes(number) for number, table in enumerate(job.rows.tables)}
    assert sizes == {name: 12 * DIM - (2 * DIM if name == "c" else 0) for name in NAMES}


# ---- rates -----------------------------------------------------------------------------------------------------------


class Rates:
    """A learning rate that notes for which steps it is asked."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, step: int) -> float:
        self.steps.append(step)
        return 0.1


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rate_is_asked_once_per_batch(world_size: int) -> None:
    """By each rank, and for each table group."""
    rates = Rates()
    rows = {"a": SGD(rates), "*": Adagrad(0.1)}
    data = batches()
    if world_size == 1:
        with PlainJob(settings_for(rows, cache_rows=CACHE_ROWS)) as job:
            job.train(data)
    else:
        train_ranks(rows, data, world_size, check=lambda job: None)
    assert sorted(rates.steps) == sorted([*range(NUM_BATCHES)] * world_size)


def test_a_rate_changed_between_two_steps_is_that_of_the_next_batch() -> None:
    """The caller walks the compute lane, and sets the rate of one table before each batch."""
    current = [0.0]
    data = batches()
    wanted = [0.3 / (1 + step) for step in range(NUM_BATCHES)]
    rows: dict[str, RowOptimizer] = {"b": Adam(lambda step: current[0]), "*": SGD(0.1)}
    expected = plain_loop({"b": Adam(lambda step: wanted[step]), "*": SGD(0.1)}, data)
    with ExitStack() as stack:
        job = stack.enter_context(PlainJob(settings_for(rows, cache_rows=CACHE_ROWS)))
        run = stack.enter_context(job.engine.train_in_steps(plan_rank_batches(data, job.spec)))
        for rate in wanted:
            current[0] = rate
            assert run.step() is not None
        assert run.step() is None
        run.end()
        same_as(expected, job)


@pytest.mark.parametrize("first", [1, 5])
def test_a_job_that_goes_on_has_the_rates_of_one_that_was_not_interrupted(first: int) -> None:
    """And Adam's correction of the bias."""
    rows = {
        "a": SGD(lambda step: 0.3 / (1 + step)),
        "b": Adam(0.1),
        "c": Frozen(),
        "*": Adagrad(lambda step: 0.01 * step),
    }
    data = batches()
    with PlainJob(settings_for(rows)) as whole:
        whole.train(data)
        expected = whole.digests()
    name = f"optimizers-{uuid.uuid4().hex}"
    with PlainJob(settings_for(rows), make_store=lambda schema: MemoryStore(schema, name=name)) as before:
        before.train(data[:first])
        dense = before.model.state_dict()
    with PlainJob(settings_for(rows), make_store=lambda schema: MemoryStore(schema, name=name)) as after:
        after.model.load_state_dict(dense)
        after.engine.train(plan_rank_batches(data[first:], after.spec), first_batch=first)
        assert after.digests() == expected


def test_an_engine_needs_the_settings_of_its_optimizers() -> None:
    with PlainJob(settings_for({"*": SGD(0.1)})) as job:
        parts = {name: getattr(job.engine, name) for name in ("layout", "cache", "store", "dense", "prepare")}
        with pytest.raises(
            InputError, match="expected row_steps, or rows_lr and eps in the settings, got EngineSettings"
        ):
            Engine(**parts, settings=EngineSettings(prefetch_depth=1, read_ahead=2))


def test_an_invalid_rate_ends_the_job() -> None:
    rows = {"a": SGD(lambda step: float("nan") if step == 3 else 0.1), "*": Adam(0.1)}
    with PlainJob(settings_for(rows)) as job:
        with pytest.raises(InputError, match=r"^SGD: lr must be a finite number of at least 0 at step 3, got nan"):
            job.train(batches())


# ---- decay with stages ----------------------------------------------------------------------------------------------

#: Schedules, ranks and keys of stages.
DECAYED: dict[str, tuple[str, int, dict[str, object]]] = {
    "chain": ("1f1b", 2, {}),
    "two pipes, rates that change": ("chimera", 2, {"optim__schedule": "cosine", "optim__schedule_length": 9}),
    "versions": ("pipedream-2bw", 2, {}),
    "micro-batches, l2": ("1f1b", 1, {"optim__rows_decay_kind": "l2"}),
    "batches left out": ("1f1b", 2, {"run__nonfinite": "skip", "optim__clip_norm": 0.05, "optim__clip_scope": "all"}),
    "parts of backwards": ("1f1b", 2, {"pipeline__backward_shares": "0.5,1"}),
}


@pytest.mark.parametrize("name", some_of([*DECAYED], set(range(6))))
def test_rows_decay_with_stages(name: str, clicks: MakeConfig) -> None:
    schedule, world_size, keys = DECAYED[name]
    config = change(clicks("mixed", limit=120), run__dtype="float64", optim__rows_weight_decay=0.5)
    split = staged(config, schedule, 2, pipeline__microbatches=2, **keys)
    cached = run_staged(change(split, cache__rows=largest_batch(split)), world_size)
    assert cached.digests == run_staged(change(split, cache__rows=0), world_size).digests
    assert cached.digests != run_staged(change(split, optim__rows_weight_decay=0.25), world_size).digests
    if schedule != "pipedream-2bw" and "backwards" not in name:
        whole = change(config, **{key: value for key, value in keys.items() if not key.startswith("pipeline")})
        assert_equal_numbers(cached, run_staged(whole))
