from __future__ import annotations

from dataclasses import dataclass

from bagpipe.jigsaw.job import TrainingJob
from bagpipe.jigsaw.policy import POLICIES
from tests.jigsaw.made_jobs import job


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    job: TrainingJob
    number: int
    attained_s: float = 0.0
    released_s: float = 0.0


def order(policy: str, *rows: Row) -> str:
    return "".join(row.job.name for row in sorted(rows, key=POLICIES[policy].order))


def test_what_comes_first() -> None:
    rows = (
        Row(job=job("a", arrival_s=3.0, deadline_s=90.0), number=0, attained_s=8.0, released_s=9.0),
        Row(job=job("b", arrival_s=2.0, weight=4.0), number=1, attained_s=20.0, released_s=7.0),
        Row(job=job("c", arrival_s=1.0), number=2, attained_s=6.0, released_s=8.0),
    )
    assert order("fifo", *rows) == "cba"
    assert order("fair", *rows) == "bca"
    assert order("edf", *rows) == "acb"
    assert order("jigsaw", *rows) == "abc"


def test_equal_jobs_keep_the_order_of_the_file() -> None:
    rows = [Row(job=job(name), number=number) for number, name in enumerate("abc")]
    for policy in POLICIES:
        assert order(policy, *reversed(rows)) == "abc"


def test_names() -> None:
    assert list(POLICIES) == [policy.name for policy in POLICIES.values()] == ["fifo", "fair", "edf", "jigsaw"]
