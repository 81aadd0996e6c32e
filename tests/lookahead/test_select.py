"""Planners by name."""

from __future__ import annotations

import pytest

from bagpipe.errors import InputError
from bagpipe.lookahead.inline import InlinePlanner
from bagpipe.lookahead.planner_process import PlannerProcess
from bagpipe.lookahead.ranked import RankedPlanner
from bagpipe.lookahead.select import select_planner
from bagpipe.testing.local_peers import local_peers
from tests.lookahead.streams import spec_of


def test_by_name() -> None:
    assert type(select_planner(spec_of())) is PlannerProcess
    assert type(select_planner(spec_of(), planner="inline")) is InlinePlanner
    ranked = select_planner(spec_of(world_size=2), planner="inline", group=local_peers(2)[0].plans)
    assert type(ranked) is RankedPlanner
    assert ranked.max_held == 3


def test_what_there_is_not() -> None:
    with pytest.raises(InputError, match=r"planner must be process, inline, unix:PATH, .* got 'thread'"):
        select_planner(spec_of(), planner="thread")
    with pytest.raises(ValueError, match="expected a spec for 1 rank, got 2"):
        select_planner(spec_of(world_size=2))
