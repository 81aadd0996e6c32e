from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.errors import InputError
from bagpipe.jigsaw.job import TrainingJob
from bagpipe.jigsaw.job_file import jobs_of_toml

ROOT = Path(__file__).parents[2]
JOB = "name = 'a'\niterations = 1\nworkers = 2\nforward_s = 1\nbackward_s = 2\n"


def of(text: str) -> tuple[TrainingJob, ...]:
    return jobs_of_toml(text, source="jobs.toml")


def test_one_number_or_a_list() -> None:
    [made] = of(f"version = 1\n[[jobs]]\n{JOB}gradient_bytes = [1, 2]\nbytes_per_s = 8\nshares = [1, 0.5]\n")
    assert made.backward_s == (2.0,)
    assert made.gradient_bytes == (1.0, 2.0)
    assert made.shares == (1.0, 0.5)


def test_jobs_keep_their_order() -> None:
    other = JOB.replace("'a'", "'b'")
    assert [each.name for each in of(f"version = 1\n[[jobs]]\n{other}[[jobs]]\n{JOB}")] == ["b", "a"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "jobs.toml: version: expected 1"),
        ("version = 1", "jobs.toml: jobs: expected at least one [[jobs]], got none"),
        ("version = 1\njobs = []", "jobs.toml: jobs: expected at least one [[jobs]], got none"),
        ("version = 1\njobs = 3", "jobs.toml: jobs: expected a list, got '3'"),
        ("version = 1\njobs = [3]", "jobs.toml: jobs[0]: expected an object, got '3'"),
        ("version = 1\nranks = 3", "jobs.toml: unknown field ranks"),
        ("version = 1\n[[jobs]]\nname = 'a'", "jobs.toml: missing field jobs[0].backward_s"),
        (f"version = 1\n[[jobs]]\n{JOB}share = 1", "jobs.toml: unknown field jobs[0].share"),
        (
            f"version = 1\n[[jobs]]\n{JOB}sync_s = -1",
            "jobs.toml: job 'a': sync_s: expected a number of at least 0, got -1",
        ),
        (
            f"version = 1\n[[jobs]]\n{JOB}shares = [1, 2]",
            "jobs.toml: job 'a': shares: expected numbers from 0 to 1, got 2",
        ),
        (
            f"version = 1\n[[jobs]]\n{JOB.replace('= 2', '= 0.5', 1)}",
            "jobs.toml: jobs[0].workers: expected an integer, got '0.5'",
        ),
        (
            f"version = 1\n[[jobs]]\n{JOB}gradient_bytes = 'x'",
            "jobs.toml: jobs[0].gradient_bytes[0]: expected a number, got 'x'",
        ),
        (
            f"version = 1\n[[jobs]]\n{JOB}arrival_s = 9\ndeadline_s = 3",
            "jobs.toml: job 'a': deadline_s: expected a time after the arrival at 9, got 3",
        ),
    ],
)
def test_bad_files(text: str, line: str) -> None:
    with pytest.raises(InputError) as error:
        of(text)
    assert str(error.value) == line


def test_a_text_that_is_not_toml() -> None:
    with pytest.raises(InputError, match=r"^jobs.toml: not valid TOML: "):
        of("[[jobs]")


def test_the_examples_can_be_read() -> None:
    for path in (ROOT / "examples" / "jigsaw").glob("*.toml"):
        assert of(path.read_text(encoding="utf-8"))
