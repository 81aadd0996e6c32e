from __future__ import annotations

import pytest

from bagpipe.schedule.catalog import SCHEDULES, Schedule
from bagpipe.schedule.check import check


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_every_schedule_is_valid_with_its_defaults(schedule: Schedule) -> None:
    check(schedule.build({option.name: option.default for option in schedule.options}))


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_options_make_flags(schedule: Schedule) -> None:
    names = [option.name for option in schedule.options]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)
    assert not {"cost", "format"} & set(names), "taken by the command line"
