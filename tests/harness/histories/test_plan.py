"""Plans are drawn from a seed alone."""

from __future__ import annotations

import pytest

from tests.harness.histories.plan import FAULT_KINDS, SERVER_KINDS, draw_plan


def test_a_seed_determines_the_plan() -> None:
    plans = [draw_plan(seed) for seed in range(300)]
    assert plans == [draw_plan(seed) for seed in range(300)]
    assert {plan.server for plan in plans} == set(SERVER_KINDS)
    assert {fault.kind.name for plan in plans for fault in plan.faults} == {kind.name for kind in FAULT_KINDS}


def test_faults_fit_the_server() -> None:
    for plan in map(draw_plan, range(300)):
        assert all(plan.server in fault.kind.servers for fault in plan.faults)
        assert plan.undoes or not any(fault.kind.undoes for fault in plan.faults)
        assert sum(fault.kind.is_single for fault in plan.faults) <= 1
        assert not (plan.refetches and any(fault.kind.name == "isolate-master" for fault in plan.faults))


@pytest.mark.parametrize(
    ("servers", "kinds", "words"),
    [
        (["mainframe"], [], "expected names among memory, everysec, .*, got mainframe"),
        ([], ["flood"], "expected names among kill-server, .*, got flood"),
        (["memory"], ["fail-over"], "none of these faults can happen to memory: fail-over"),
    ],
)
def test_what_cannot_be_drawn(servers: list[str], kinds: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        draw_plan(1, servers=servers, kinds=kinds)
