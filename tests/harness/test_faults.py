from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.util.failpoints import POINTS
from tests.harness.faults import KINDS, MAX_FAULTS, Fault, FaultSchedule, kinds_named


@given(seed=st.integers(0, 2**40), world_size=st.integers(1, 4))
def test_a_schedule_is_a_function_of_its_seed(seed: int, world_size: int) -> None:
    schedule = FaultSchedule(seed=seed, world_size=world_size, num_batches=30, num_checkpoints=4)
    faults = schedule.faults
    assert faults == FaultSchedule(seed=seed, world_size=world_size, num_batches=30, num_checkpoints=4).faults
    assert 1 <= len(faults) <= MAX_FAULTS
    for fault in faults:
        assert (fault.point != "") == (fault.kind == "kill-point")
        assert fault.point in ("", *POINTS)
        assert 0 <= fault.at < 1
        assert 0 <= fault.rank < world_size
        assert 1 <= fault.times <= 30


def test_many_seeds_draw_every_kind_and_every_point() -> None:
    faults = [fault for seed in range(2000) for fault in FaultSchedule(seed=seed).faults]
    assert {fault.kind for fault in faults} == {kind.name for kind in KINDS}
    assert {fault.point for fault in faults} == {"", *POINTS}


def test_only_the_given_kinds_are_drawn() -> None:
    kinds = kinds_named("zombie, kill-store")
    assert [kind.name for kind in kinds] == ["zombie", "kill-store"]
    drawn = {fault.kind for seed in range(50) for fault in FaultSchedule(seed=seed, kinds=kinds).faults}
    assert drawn == {"zombie", "kill-store"}
    assert kinds_named("") == KINDS
    with pytest.raises(ValueError, match=r"expected kinds of fault among kill-trainer, .* got 'earthquake'"):
        kinds_named("earthquake")


def test_str_of_a_fault() -> None:
    assert str(Fault(kind="kill-point", point="after-manifest", times=3, rank=1)) == "kill-point@after-manifest:3/1"
    assert str(Fault(kind="zombie", at=0.251)) == "zombie@0.25/0"
