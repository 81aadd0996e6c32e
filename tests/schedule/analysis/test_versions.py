from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check, check_loop
from bagpipe.schedule.analysis.versions import KeptWeights, Weights, kept_weights, version_problems, version_table
from bagpipe.schedule.ir.loop import Loop
from bagpipe.schedule.ir.program import Program, Semantics, Stage
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.registry import ASYNCHRONOUS_SCHEDULES
from tests.schedule.dense import dense
from tests.schedule.tables import lanes


def one_lane(text: str, semantics: Semantics, micro: int = 1) -> Program:
    return Program(lanes=lanes(a=text), semantics=semantics, stages=(Stage(number=0, micro_per_batch=micro),))


def uses(program: Program) -> list[tuple[str, str, int]]:
    return [(use.action.text, use.weights.text, use.staleness) for use in version_table(program)]


def test_versions_and_predictions_are_found() -> None:
    program = one_lane("0F0@0 0B0@0 0PRED1@0 0F1@1 0OPT0 0PRED_B1@1 0B1@3 0OPT1", "predict")
    assert uses(program) == [
        ("0F0@0", "0", 0), ("0B0@0", "0", 0), ("0PRED1@0", "0", 1), ("0F1@1", "0+1", 1), ("0OPT0", "0", 0),
        ("0PRED_B1@1", "1", 0), ("0B1@3", "1+2", 0), ("0OPT1", "1", 0),
    ]  # fmt: skip
    assert [use.makes for use in version_table(program) if use.makes is not None] == [1, 2]
    assert kept_weights(program) == {0: KeptWeights(versions=1, predictions=1)}


def test_a_backward_that_keeps_the_weights_of_its_forward_keeps_its_prediction() -> None:
    program = one_lane("0F0@0 0PRED1@0 0F1@1 0I0@0 0W0@0 0OPT0 0I1@1 0W1@1 0OPT1", "stash")
    assert uses(program)[-3:] == [("0I1@1", "0+1", 1), ("0W1@1", "0+1", 1), ("0OPT1", "1", 0)]
    assert kept_weights(program) == {0: KeptWeights(versions=1, predictions=1)}


def test_a_version_is_kept_until_its_last_use() -> None:
    stash = "0F0@0 0F1@0 0F2@0 0B0@0 0OPT0 0B1@0 0OPT1 0B2@0 0OPT2"
    assert kept_weights(one_lane(stash, "stash"))[0].versions == 2, "version 0, and the newest one in place"
    current = "0F0@0 0F1@0 0F2@0 0B0@0 0OPT0 0B1@1 0OPT1 0B2@2 0OPT2"
    assert kept_weights(one_lane(current, "predict"))[0].versions == 1
    spread = "0F0@0 0B0@0 0OPT0 0F1@0 0F2@1 0B1@0 0OPT1 0B2@1 0OPT2"
    assert kept_weights(one_lane(spread, "stash"))[0].versions == 2


@pytest.mark.parametrize(
    ("text", "semantics", "message"),
    [
        ("0F0@0 0B0@0 0OPT0 0F1@2", "stash", "0F1@2 uses version 2; the newest is version 1"),
        ("0F0@0 0B0@0 0OPT0 0F1 0B1", "stash", "0F1 names no version, in a program of semantics stash"),
        ("0F0@0 0F1@0 0B0@0 0OPT0 0B1@1", "stash", "0B1@1 uses version 1, its F used version 0"),
        ("0F0@0 0I0@0 0F1@0 0I1@0 0W0@0 0OPT0 0W1@1", "predict", "0W1@1 uses version 1, its I used version 0"),
        ("0F0@0 0B0@0 0OPT0 0F1@1 0B1@1 0OPT1", "delay", r"0F1@1 uses version 1, expected version 0 \(delay 1\)"),
        ("0F0@0 0B0@0 0OPT0 0PRED1@0 0F1@1", "predict", "0PRED1@0 predicts from version 0; the newest is version 1"),
        ("0F0@0 0B0@0 0OPT0 0PRED1@1 0F1@0", "predict", "0F1@0 uses version 0, predicted from the later version 1"),
        ("0F0@0 0F1@0 0B1@0 0OPT1", "stash", "0OPT1 makes version 2; the newest is version 0"),
        ("0F1@0", "sync", "0F1@0 uses version 0; in a sync program batch 1 uses version 1"),
    ],
)  # fmt: skip
def test_wrong_versions_are_refused(text: str, semantics: Semantics, message: str) -> None:
    program = one_lane(text, semantics)
    with pytest.raises(ScheduleError, match=f"versions: {message}"):
        version_table(program)
    assert len(list(version_problems(program))) >= 1
    with pytest.raises(ScheduleError):
        check(program)


def test_a_synchronous_program_uses_the_version_of_its_batch() -> None:
    table = version_table(dense("chimera", 4, 4))
    assert {(use.weights, use.staleness) for use in table} == {(Weights(0), 0)}
    assert set(kept_weights(dense("zb-v", 2, 4)).values()) == {KeptWeights(versions=1, predictions=0)}


def test_the_newest_version_at_a_forward_is_not_a_delay_of_one() -> None:
    """The naive rule mixes delays of 0 and 1 on early stages, and has none on the last one."""
    loop = ASYNCHRONOUS_SCHEDULES["pipedream-2bw"].loop(chain(2, 4))
    check_loop(loop)
    newest = {
        lane: tuple(
            dataclasses.replace(t, version_lag=0 if t.offset == 0 else 1) if t.op in ("F", "B") else t
            for t in templates
        )
        for lane, templates in loop.lanes.items()
    }
    with pytest.raises(ScheduleError, match=r"versions: 0F5@1 uses version 1, expected version 0 \(delay 1\)"):
        check_loop(dataclasses.replace(loop, lanes=newest))


@settings(max_examples=25)
@given(st.sampled_from(list(ASYNCHRONOUS_SCHEDULES)), st.integers(1, 6), st.integers(1, 7), st.integers(0, 9))
def test_the_ramp_shows_every_bound(name: str, ranks: int, micro: int, more: int) -> None:
    """More batches than `Loop.ramp` change neither what is kept nor how old it is."""
    loop = ASYNCHRONOUS_SCHEDULES[name].loop(chain(ranks, max(micro, ranks - 1)))
    assert kept_weights(loop.unroll(loop.ramp() + more)) == kept_weights(loop.unroll(loop.ramp()))
    assert oldest(loop, loop.ramp() + more) == oldest(loop, loop.ramp())


def oldest(loop: Loop, batches: int) -> dict[tuple[int, str], int]:
    found: dict[tuple[int, str], int] = {}
    for use in version_table(loop.unroll(batches)):
        key = (use.stage, use.of)
        found[key] = max(found.get(key, 0), use.staleness)
    return found
