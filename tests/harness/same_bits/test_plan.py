"""The plan is valid, and reaches every kind that the configuration knows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import cache

import pytest

from bagpipe.config.keys import config_keys
from bagpipe.config.optim_section import ROW_CHOICES
from bagpipe.config.sections import Config
from bagpipe.schedule.registry import TRAINED_SCHEDULES
from tests.harness.fuzz.draw import NOWHERE, settings_of
from tests.harness.fuzz.space import JOB, MODEL, choices_of, config_of
from tests.harness.same_bits.plan import JOBS, LEFT, Job

ENUMERATED = [key.path for key in config_keys() if choices_of(key.path) and key.path not in LEFT]


def settings(job: Job) -> dict[str, str]:
    draw = job.draw("whole")
    return settings_of(draw, draw.twins[0], NOWHERE)


@cache
def reached() -> Mapping[str, set[str]]:
    """Values of all jobs by key, the defaults of those that do not give it among them."""
    found: dict[str, set[str]] = defaultdict(set)
    for job in JOBS:
        config: Config = config_of({path: value for path, value in settings(job).items() if value})
        for key in config_keys():
            section, _, name = key.path.partition(".")
            value = getattr(getattr(config, section), name)
            found[key.path].add(str(value).lower() if isinstance(value, bool) else str(value))
    return found


def test_names_are_unique() -> None:
    assert [name for name, count in Counter(job.name for job in JOBS).items() if count > 1] == []


@pytest.mark.parametrize("job", JOBS, ids=[job.name for job in JOBS])
def test_jobs_are_valid(job: Job) -> None:
    config_of({path: value for path, value in settings(job).items() if value})


@pytest.mark.parametrize("path", ENUMERATED)
def test_every_choice_of_an_enumerated_key_has_a_job(path: str) -> None:
    """A new choice needs a job, or a reason in `LEFT`."""
    left = {name.partition("=")[2] for name in LEFT if name.startswith(f"{path}=")}
    assert reached()[path] | left == set(choices_of(path))


@pytest.mark.parametrize(
    "path", sorted({path for group in (*JOB, MODEL) for path in group} - set(ENUMERATED) - {*LEFT})
)
def test_every_key_that_decides_results_has_a_job(path: str) -> None:
    """With another value than its default."""
    section, _, name = path.partition(".")
    assert reached()[path] - {str(getattr(getattr(Config(), section), name))}


def test_every_schedule_number_of_ranks_and_end_has_a_job() -> None:
    assert reached()["pipeline.schedule"] == {"none", *TRAINED_SCHEDULES}
    assert {job.ranks for job in JOBS} == {1, 2, 3, 4}
    assert {kill.signal for job in JOBS for kill in job.kills} == {"SIGKILL", "SIGINT"}
    assert any(job.source for job in JOBS)
    halves = [settings(job) for job in JOBS if job.half]
    assert {values.get("pipeline.schedule", "none") for values in halves} > {"none", "chimera", "pipedream"}


def test_every_row_optimizer_has_a_job() -> None:
    by_table = {pair.partition("=")[2] for job in JOBS for pair in _by_table(job)}
    assert reached()["optim.rows"] | by_table == set(ROW_CHOICES)


def _by_table(job: Job) -> list[str]:
    text = settings(job).get("optim.rows_by_table", "")
    return text.split(",") if text else []
