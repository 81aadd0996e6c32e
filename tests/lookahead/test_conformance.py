"""Conformance of the planners that plan outside the training process: `PlannerProcess` and `RemotePlanner`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import given, settings

from bagpipe.client.access import Cacher
from bagpipe.errors import CapacityError, InputError
from bagpipe.lookahead.interface import WindowPlanner
from bagpipe.lookahead.planner_process import PlannerProcess
from bagpipe.lookahead.protocol import SLACK
from bagpipe.lookahead.remote import RemotePlanner
from bagpipe.oracle.plan import OracleSpec
from bagpipe.types.batch import Batch
from tests.lookahead.plan_daemons import plan_daemon
from tests.lookahead.streams import Counted, batch_of, batches_of, expected_parts, plain_part, spec_of
from tests.oracle.batches import traces

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module", params=["process", "remote"])
def make_planner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], WindowPlanner]]:
    """Makes planners that are not entered. The ring of a process is smaller than a batch."""
    if request.param == "process":
        yield partial(PlannerProcess, spec_of(), ring_bytes=1 << 12)
        return
    with plan_daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield lambda: RemotePlanner(spec_of(), Cacher(daemon.url))
        assert not [line for line in daemon.logs if "traceback" in line or "time" not in line]


@pytest.fixture(scope="module")
def planner(make_planner: Callable[[], WindowPlanner]) -> Iterator[WindowPlanner]:
    """One planner, which serves run after run."""
    with make_planner() as planner:
        yield planner


def indexes(planner: WindowPlanner, batches: Iterator[Batch]) -> Iterator[int]:
    return (part.batch.index for part in planner.run(batches))


@settings(max_examples=50, deadline=None)
@given(trace=traces(max_ranks=1))
def test_plans_are_those_of_the_oracle(planner: WindowPlanner, trace: tuple[OracleSpec, list[Batch]]) -> None:
    planner.spec, batches = trace
    found = list(planner.run(batches))
    assert [plain_part(part) for part in found] == expected_parts(batches, planner.spec)
    assert all(part.batch is batch for part, batch in zip(found, batches, strict=True))
    planner.spec = spec_of()


@settings(max_examples=30, deadline=None)
@given(trace=traces(max_batches=5))
def test_plans_for_all_ranks(planner: WindowPlanner, trace: tuple[OracleSpec, list[Batch]]) -> None:
    planner.spec, batches = trace
    plans = list(planner.plan_all(batches, 0, lambda batch: None))
    for rank in range(planner.spec.world_size):
        found = [plain_part(plan.part(rank, batch)) for plan, batch in zip(plans, batches, strict=True)]
        assert found == expected_parts(batches, planner.spec, rank)
    planner.spec = spec_of()


@pytest.mark.parametrize(("num_batches", "size"), [(12, 3_000), (5, 70_000)])
def test_batches_larger_than_the_ring_and_of_many_pieces(planner: WindowPlanner, num_batches: int, size: int) -> None:
    planner.spec = spec_of(num_slots=100)
    batches = batches_of(num_batches, size=size)
    assert [plain_part(part) for part in planner.run(batches)] == expected_parts(batches, planner.spec)
    planner.spec = spec_of()


@pytest.mark.parametrize(("num_slots", "window"), [(20, 3), (0, 1)])
def test_holds_a_window_and_the_slack(planner: WindowPlanner, num_slots: int, window: int) -> None:
    planner.spec = spec_of(num_slots=num_slots)
    counted = Counted(batches_of(15))
    for _ in planner.run(counted):
        counted.held -= 1
    assert (counted.held, counted.most_held) == (0, window + SLACK)
    assert planner.max_held == window + SLACK
    planner.spec = spec_of()


@pytest.mark.parametrize("first_batch", [0, 2])
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_closed_run_leaves_nothing_to_the_next(planner: WindowPlanner, taken: int, first_batch: int) -> None:
    unfinished = planner.run(batches_of(9))
    assert len([next(unfinished) for _ in range(taken)]) == taken
    unfinished.close()
    found = list(planner.run(batches_of(9), first_batch=first_batch))
    assert [plain_part(part) for part in found] == expected_parts(batches_of(9)[first_batch:], planner.spec)


def test_first_batch(planner: WindowPlanner) -> None:
    assert [part.batch.index for part in planner.run(batches_of(9), first_batch=4)] == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("count", [0, 2, 12])
def test_an_error_of_the_batches_comes_after_those_before(planner: WindowPlanner, count: int) -> None:
    error = KeyError("disk")

    def failing() -> Iterator[Batch]:
        yield from batches_of(count)
        raise error

    found: list[int] = []
    with pytest.raises(KeyError) as caught:
        found.extend(indexes(planner, failing()))
    assert caught.value is error
    assert found == list(range(count))


def test_a_bad_id_comes_after_the_batches_before(planner: WindowPlanner) -> None:
    found: list[int] = []
    with pytest.raises(InputError, match="100"):
        found.extend(indexes(planner, iter([*batches_of(4), batch_of(4, 100), *batches_of(9)[5:]])))
    assert found == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [1, 4, 20])
def test_the_error_of_a_large_batch_names_the_cache_that_its_window_needs(planner: WindowPlanner, count: int) -> None:
    planner.spec = spec_of(lookahead=9)
    last = min(count, 9) - 1
    with pytest.raises(CapacityError) as caught:
        list(planner.run(batch_of(index, *range(30 + index)) for index in range(count)))
    assert str(caught.value) == (
        "batch 0 needs 30 unique rows but cache_rows is 20: raise cache_rows to at least "
        f"{30 + last}, the largest need up to batch {last}, or bring smaller batches"
    )
    planner.spec = spec_of()


def test_one_run_at_a_time_inside_the_context(
    planner: WindowPlanner, make_planner: Callable[[], WindowPlanner]
) -> None:
    first = planner.run(batches_of(9))
    next(first)
    with pytest.raises(RuntimeError, match="one run at a time"):
        next(planner.run(batches_of(9)))
    first.close()
    with pytest.raises(RuntimeError, match="inside its `with` block"):
        next(make_planner().run([]))
