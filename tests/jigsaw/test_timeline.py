from __future__ import annotations

from bagpipe.jigsaw.policy import POLICIES
from bagpipe.jigsaw.simulate import run_jobs
from tests.jigsaw.made_jobs import job


def test_ends_and_label() -> None:
    jobs = [job("a", arrival_s=5.0), job("b", arrival_s=3.0, iterations=1, workers=1, shares=(0.5,))]
    timeline = run_jobs(jobs, 2, POLICIES["fifo"])
    assert (timeline.first_s, timeline.last_s) == (3.0, 22.0)
    assert timeline.label == "fifo, partial backward"
    assert run_jobs(jobs[:1], 2, POLICIES["edf"]).label == "edf, full backward"


def test_pieces_of_a_rank() -> None:
    timeline = run_jobs([job("a", iterations=2)], 2, POLICIES["jigsaw"])
    assert [(piece.worker, piece.start_s) for piece in timeline.of_rank(1)] == [(1, 0.0), (1, 4.0)]
