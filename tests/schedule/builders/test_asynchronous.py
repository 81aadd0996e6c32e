"""1F1B that never drains: order, time, memory, weight versions and staleness of every asynchronous schedule."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import RUNNER_RULES, check, check_loop
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.analysis.versions import KeptWeights, VersionUse, kept_weights, version_table
from bagpipe.schedule.builders.asynchronous import drained, pipeoptim
from bagpipe.schedule.ir.loop import Loop
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.ir.version_lags import version_lags
from bagpipe.schedule.registry import ASYNCHRONOUS_SCHEDULES
from tests.effort import costly
from tests.schedule.dense import peaks, rows
from tests.schedule.period import period

SIZES = [(1, 1), (2, 1), (4, 1), (4, 2), (4, 4), (3, 8)]
CASES = [
    (name, ranks, micro)
    for name in ASYNCHRONOUS_SCHEDULES
    for ranks, micro in SIZES
    if name != "pipedream-2bw" or micro >= ranks - 1
]

sizes = st.tuples(st.integers(1, 6), st.integers(1, 7))


def loop_of(name: str, ranks: int, micro: int) -> Loop:
    return ASYNCHRONOUS_SCHEDULES[name].loop(chain(ranks, micro))


def settled(name: str, ranks: int, micro: int) -> Program:
    loop = loop_of(name, ranks, micro)
    check_loop(loop)
    return loop.unroll(loop.ramp())


def weights(name: str, ranks: int, micro: int) -> dict[tuple[int, str], list[VersionUse]]:
    """(stage, forward or backward) -> the use of every batch; its micro-batches have the same weights."""
    found: dict[tuple[int, str], list[VersionUse]] = {}
    for use in (use for use in version_table(settled(name, ranks, micro)) if use.of in ("forward", "backward")):
        own = found.setdefault((use.stage, use.of), [])
        if own and own[-1].batch == use.batch:
            assert own[-1].weights == use.weights
        else:
            own.append(use)
    return found


def test_forwards_of_the_next_batch_come_before_the_last_backwards() -> None:
    assert rows(loop_of("pipedream", 2, 2).unroll(2)) == [
        "0F0@0,0F1@0,0B0@0,0F2@0,0B1@0,0OPT0,0F3@0,0B2@0,0B3@0,0OPT1",
        "1F0@0,1B0@0,1F1@0,1B1@0,1OPT0,1F2@1,1B2@1,1F3@1,1B3@1,1OPT1",
    ]


def test_predictions_come_before_the_first_forward_and_the_first_backward() -> None:
    assert rows(loop_of("spectrain", 3, 1).unroll(3)) == [
        "0PRED0@0,0F0@0,0PRED1@0,0F1@1,0PRED2@0,0F2@2,0B0@0,0OPT0,0B1@1,0OPT1,0B2@2,0OPT2",
        "1PRED0@0,1F0@0,1PRED1@0,1F1@1,1B0@0,1OPT0,1PRED2@1,1F2@2,1B1@1,1OPT1,1B2@2,1OPT2",
        "2PRED0@0,2F0@1,2PRED_B0@0,2B0@1,2OPT0,2PRED1@1,2F1@2,2PRED_B1@1,2B1@2,2OPT1,"
        "2PRED2@2,2F2@3,2PRED_B2@2,2B2@3,2OPT2",
    ]


@pytest.mark.parametrize(("name", "ranks", "micro"), CASES)
def test_no_rank_idles_in_the_steady_state(name: str, ranks: int, micro: int) -> None:
    """One more batch takes as long as the busiest rank's own work: no bubble except one fill and drain."""
    loop = loop_of(name, ranks, micro)
    loads = [sum(OPS[template.op].cost for template in templates) for templates in loop.lanes.values()]
    assert period(loop).value == max(loads)
    assert min(loads) >= 3 * micro + 1
    ends = {batches: simulate(loop.unroll(batches)).makespan for batches in (17, 18, 40)}
    assert ends[18] - ends[17] == max(loads)
    assert ends[40] - ends[18] == 22 * max(loads)


@pytest.mark.parametrize(("name", "ranks", "micro"), CASES)
def test_it_is_valid_for_any_number_of_batches(name: str, ranks: int, micro: int) -> None:
    for batches in (1, 2, 5):
        program = ASYNCHRONOUS_SCHEDULES[name].build(chain(ranks, micro), num_batches=batches)
        check(program)
        assert program.num_batches() == batches
        in_flight = [min(batches * micro, ranks - rank) for rank in range(ranks)]
        assert peaks(simulate(program)) == in_flight, "that of 1F1B with a flush"


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_one_micro_batch_gives_the_papers_versions(ranks: int) -> None:
    """Between F and its own B lie P - 1 - k updates; at the start 0, 1, 2, …."""
    for (stage, _), uses in weights("pipedream", ranks, 1).items():
        assert [use.staleness for use in uses] == [min(use.batch, ranks - 1 - stage) for use in uses]
    kept = kept_weights(settled("pipedream", ranks, 1))
    assert [kept[stage].versions for stage in range(ranks)] == [ranks - stage for stage in range(ranks)]
    vertical = kept_weights(settled("pipedream-vertical", ranks, 1))
    assert {vertical[stage].versions for stage in range(ranks)} == {ranks}
    second = kept_weights(settled("spectrain-v2", ranks, 1))
    stashed = [ranks - stage if stage < ranks - 1 else 0 for stage in range(ranks)]
    assert [second[stage] for stage in range(ranks)] == [KeptWeights(versions=1, predictions=n) for n in stashed]


@costly(20)
@given(sizes)
def test_pipedream_with_any_micro_batches(size: tuple[int, int]) -> None:
    """``ceil((P - 1 - k) / M)`` updates lie between F and B, and one version more is kept."""
    ranks, micro = size
    gaps = [math.ceil((ranks - 1 - stage) / micro) for stage in range(ranks)]
    for name, own in (("pipedream", gaps), ("pipedream-vertical", [gaps[0]] * ranks)):
        for (stage, _), uses in weights(name, ranks, micro).items():
            assert [use.staleness for use in uses] == [min(use.batch, own[stage]) for use in uses]
        kept = kept_weights(settled(name, ranks, micro))
        assert [kept[stage] for stage in range(ranks)] == [KeptWeights(versions=n + 1, predictions=0) for n in own]


@settings(max_examples=20)
@given(sizes)
def test_two_buffered_weights(size: tuple[int, int]) -> None:
    ranks, micro = size[0], max(size[1], size[0] - 1)
    for uses in weights("pipedream-2bw", ranks, micro).values():
        assert [use.weights.text for use in uses] == [str(max(0, use.batch - 1)) for use in uses]
    assert set(kept_weights(settled("pipedream-2bw", ranks, micro)).values()) == {
        KeptWeights(versions=2, predictions=0)
    }


@pytest.mark.parametrize(("ranks", "micro"), [(3, 1), (5, 3)])
def test_two_buffered_weights_need_micro_batches(ranks: int, micro: int) -> None:
    with pytest.raises(ScheduleError, match=f"at least {ranks - 1}, one less than the stages, got {micro}"):
        loop_of("pipedream-2bw", ranks, micro)


@pytest.mark.parametrize(("ranks", "forward", "backward"), [(3, [2, 1, 1], [0, 0, 1]), (4, [3, 2, 2, 1], [0, 0, 1, 1])])
def test_spectrain_predicts_as_far_as_published(ranks: int, forward: list[int], backward: list[int]) -> None:
    found = weights("spectrain", ranks, 1)
    assert [found[stage, "forward"][-1].weights.steps for stage in range(ranks)] == forward
    assert [found[stage, "backward"][-1].weights.steps for stage in range(ranks)] == backward
    second = weights("spectrain-v2", ranks, 1)
    assert [second[stage, "forward"][-1].weights.steps for stage in range(ranks)] == list(range(ranks))[::-1]


@settings(max_examples=20)
@given(sizes)
def test_spectrain_aims_at_one_version(size: tuple[int, int]) -> None:
    """Forward and backward of a batch stand for the version at which rank 0 ends the batch; v2: for the batch's own."""
    ranks, micro = size
    found = weights("spectrain", ranks, micro)
    for stage in range(ranks):
        ahead = math.ceil(stage // 2 / micro)
        for of in ("forward", "backward"):
            assert [use.weights.version for use in found[stage, of]] == [use.batch + ahead for use in found[stage, of]]
        assert {use.staleness for use in found[stage, "backward"]} == {0}
    kept = kept_weights(settled("spectrain", ranks, micro))
    assert {each.versions for each in kept.values()} == {1}
    assert max(each.predictions for each in kept.values()) <= (1 if micro == 1 else 2)
    second = weights("spectrain-v2", ranks, micro)
    for stage in range(ranks):
        forwards, backwards = second[stage, "forward"], second[stage, "backward"]
        assert [use.weights for use in forwards] == [use.weights for use in backwards]
        assert [use.weights.version for use in forwards] == [use.batch for use in forwards]


@settings(max_examples=20)
@given(sizes, st.integers(-3, 3))
def test_pipeoptim_predicts_its_backwards_version(size: tuple[int, int], offset: int) -> None:
    ranks, micro = size
    found = weights("pipeoptim", ranks, micro)
    shifted = pipeoptim(chain(ranks, micro), 1, prediction_offset=offset)
    check_loop(shifted)
    moved = {
        (use.stage, use.batch): use.weights
        for use in version_table(shifted.unroll(shifted.ramp()))
        if use.of == "forward"
    }
    for stage in range(ranks):
        gap = math.ceil((ranks - 1 - stage) / micro)
        for forward, backward in zip(found[stage, "forward"], found[stage, "backward"], strict=True):
            assert forward.weights.steps == min(gap, forward.batch), "updates that will really happen before B"
            assert forward.weights.version == backward.weights.base == backward.batch
            assert backward.weights.steps == 0
            if (stage, forward.batch) in moved:
                assert moved[stage, forward.batch].steps == max(0, min(gap, forward.batch) + offset)
    kept = kept_weights(settled("pipeoptim", ranks, micro))
    assert [kept[stage].predictions for stage in range(ranks)] == [int(stage < ranks - 1) for stage in range(ranks)]
    assert {each.versions for each in kept.values()} == {1}


@settings(max_examples=20)
@given(st.sampled_from(list(ASYNCHRONOUS_SCHEDULES)), sizes)
def test_drained_it_has_the_same_weights(name: str, size: tuple[int, int]) -> None:
    """Rows that are read after the updates of the batch before change the order, and no weights."""
    ranks, micro = size[0], max(size[1], size[0] - 1) if name == "pipedream-2bw" else size[1]
    loop = loop_of(name, ranks, micro)
    order = drained(chain(ranks, micro), loop)
    programs = [each.unroll(order.ramp()) for each in (loop, order)]
    check(programs[1])
    first, second = (
        {use.action.text: use.weights for use in version_table(program) if use.of in ("forward", "backward")}
        for program in programs
    )
    assert first == second
    kept, gaps = kept_weights(programs[1]), version_lags(loop)
    for stage, most in kept_weights(programs[0]).items():
        assert kept[stage].versions == most.versions
        assert kept[stage].predictions <= max(most.predictions, gaps[stage].forward_base + 1)
    for actions in programs[1].lanes.values():  # a batch ends before the next one begins
        own = [action.index // micro for action in actions if action.index is not None and action.op in ("F", "B")]
        assert own == sorted(own)


def test_its_own_order_is_not_that_of_synchronous_training() -> None:
    with pytest.raises(ScheduleError, match="source 0F must be performed once per batch, found 2"):
        check_loop(loop_of("pipedream", 1, 2), RUNNER_RULES)
