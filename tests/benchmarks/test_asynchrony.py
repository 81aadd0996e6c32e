"""Data, records and pictures of benchmarks/asynchrony."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bagpipe.schedule.ir.actions import parse
from bagpipe.testing.local_links import LocalLinks, Mail
from benchmarks.asynchrony.dense_ranks import DENSE_JOBS, DenseJob, forecast_s, simulated_s
from benchmarks.asynchrony.main import BENCHMARK
from benchmarks.asynchrony.quality import LATE_SCHEDULES, Run, flags_of, late_runs_of, runs_of
from benchmarks.asynchrony.ratings import NUM_FILMS, NUM_GENRES, NUM_USERS, write_ratings
from benchmarks.asynchrony.records import by_key, jobs_of
from benchmarks.asynchrony.sources import SOURCES
from benchmarks.harness.benchmark import run_benchmark
from data.movielens import MovieLensSource, find_genres
from data.synthetic_options import options_at


def columns_of(folder: Path) -> NDArray[np.int64]:
    """Users, films, ratings and times."""
    lines = (folder / "ratings.dat").read_text().replace("::", " ").splitlines()
    return np.loadtxt(lines, dtype=np.int64).T


def test_ratings_are_like_movielens(tmp_path: Path) -> None:
    write_ratings(tmp_path, 20_000, seed=3)
    users, films, ratings, times = columns_of(tmp_path)
    assert users.size == np.unique(users * (NUM_FILMS + 1) + films).size == 20_000
    assert (users.min(), films.min()) >= (1, 1)
    assert users.max() <= NUM_USERS
    assert films.max() <= NUM_FILMS
    assert (np.diff(times) >= 0).all()
    assert set(ratings) == {1, 2, 3, 4, 5}
    assert 0.4 < (ratings >= 4).mean() < 0.7
    genres = find_genres(str(tmp_path))
    assert genres is not None
    assert genres.num_genres == NUM_GENRES
    assert genres.films.size == NUM_FILMS
    assert 1.5 < genres.genres.size / NUM_FILMS < 1.9


def test_ratings_have_structure_of_users_and_films(tmp_path: Path) -> None:
    """The variance of ratings between films is more than chance gives, and so is that between users."""
    write_ratings(tmp_path, 20_000, seed=0)
    columns = columns_of(tmp_path)
    ratings = columns[2] - columns[2].mean()
    for ids in columns[:2]:
        counts, sums = np.bincount(ids), np.bincount(ids, weights=ratings)
        often = counts >= 10
        between = (sums[often] ** 2 / counts[often]).mean()
        assert between > 1.5 * ratings.var()  # without structure: the variance of a rating


def test_ratings_are_those_of_the_seed(tmp_path: Path) -> None:
    texts = []
    for number, seed in enumerate((1, 1, 2)):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_ratings(folder, 500, seed)
        texts.append((folder / "ratings.dat").read_text() + (folder / "movies.dat").read_text())
    assert texts[0] == texts[1] != texts[2]


def test_sources_give_as_many_examples_as_asked(tmp_path: Path) -> None:
    flags = SOURCES["synthetic"](tmp_path, "", 2_000_000, 0)
    assert options_at(flags[flags.index("--data.schema") + 1]).rows == 2_000_000
    flags = SOURCES["movielens"](tmp_path, "", 700, 0)
    source = MovieLensSource.at(flags[flags.index("--data.path") + 1])
    assert sum(source.count_rows(segment) for segment in source.segments()) == 700


def test_runs_compare_schedules_with_the_synchronous_one() -> None:
    runs = list(runs_of(((4, 1),), 2))
    assert len(runs) == len(set(runs)) == 14
    assert {run.microbatches for run in runs if run.schedule == "pipedream-2bw"} == {3}
    late = list(late_runs_of(((2, 4), (4, 4)), 3))
    assert len(late) == len(set(late)) == 3 * (1 + 2 * 2 * len(LATE_SCHEDULES))
    assert [run.rows_delay for run in late if run.schedule == "1f1b"] == [0, 0, 0]


def test_flags_of_a_job() -> None:
    run = Run(schedule="pipedream", stages=2, microbatches=4, seed=1)
    assert "--pipeline.rows_delay" not in flags_of(run, [])
    late = flags_of(Run(schedule="pipedream", stages=2, microbatches=4, seed=1, rows_delay=1), ["--data.path", "x"])
    assert late[late.index("--pipeline.rows_delay") + 1] == "1"
    assert late[late.index("--data.path") + 1] == "x"


TINY = [
    "--model.embedding_dim", "4", "--model.bottom_mlp", "8,4", "--model.top_mlp", "8,4", "--data.batch_size", "32",
    "--optim.dense", "adam",
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "rows_delay"), [("1f1b", 0), ("pipeoptim", 1)])
def test_dense_part_alone_times_every_action(schedule: str, rows_delay: int) -> None:
    mail = Mail(timeout_s=60)
    jobs = [DenseJob(schedule, rows_delay, rank=rank, links=LocalLinks(mail, rank, 0), flags=TINY) for rank in range(2)]
    before = [[p.detach().clone() for _, p in jobs[r].pipeline.staged.parameters_of(r)] for r in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda job: job.run(8), jobs))
    times: dict[str, float] = {}
    for rank, (batch_s, spent) in enumerate(found):
        assert batch_s > 0
        counts = Counter((action.stage, action.op) for action in map(parse, spent))
        assert (counts[rank, "F"], counts[rank, "B"], counts[rank, "OPT"]) == (64, 64, 8)
        times |= spent
        after = [p for _, p in jobs[rank].pipeline.staged.parameters_of(rank)]
        assert not any(torch.equal(old, new) for old, new in zip(before[rank], after, strict=True))
    lanes = jobs[0].step.program.lanes.values()
    assert {action.op for lane in lanes for action in lane} == {action.op for action in map(parse, times)}
    assert simulated_s(jobs[0].step, times, 8, 0.0) > 0


def test_dense_part_alone_is_simulated_as_its_schedule() -> None:
    """Nothing but forwards and backwards costs: 1f1b has a bubble of one micro-batch, the others have none."""
    links = LocalLinks(Mail(timeout_s=60), 0, 0)
    batches = 12
    for (schedule, rows_delay), expected in zip(DENSE_JOBS, (27, 24, 24, 24), strict=True):
        step = DenseJob(schedule, rows_delay, rank=0, links=links, flags=TINY).step
        costs = {"F": 1.0, "B": 2.0}
        times: dict[str, float] = {}
        for action in (action for lane in step.program.lanes.values() for action in lane):
            units = step.program.units_per_batch((action.stage, action.op), action.peer)
            for b in range(batches):
                of_batch = dataclasses.replace(action, index=(action.index or 0) + b * units)
                times[of_batch.text] = costs.get(action.op, 0.0)
        assert simulated_s(step, times, batches, 0.0) == pytest.approx(expected)
        assert forecast_s(step, times, 0.0) == pytest.approx(expected)


def test_records_by_key_and_jobs() -> None:
    run = {"schedule": "pipedream", "stages": 2, "microbatches": 4, "seed": 5}
    scores = [{"auc": 0.5}]
    records = [{"run": run, "scores": scores}, {"run": {**run, "rows_delay": 1}, "scores": []}]
    assert by_key(records) == {("pipedream", 2, 4, 0): {5: scores}, ("pipedream", 2, 4, 1): {5: []}}
    assert jobs_of([{"latency_s": 1.0, "1f1b/0": {}, "pipedream/1": {}}]) == ["1f1b/0", "pipedream/1"]


def test_report_draws_every_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    values = json.loads((BENCHMARK.folder / "results.json").read_text())
    parts = values["parts"]
    few = {name: parts[name] | {"found": parts[name]["found"][:2]} for name in ("sample", "distance", "throughput")}
    values["parts"] = few | {"ranks": parts["ranks"]}
    (tmp_path / "results.json").write_text(json.dumps(values))
    assert run_benchmark(BENCHMARK, ["--report", "--out", str(tmp_path)]) == 0
    for name in ("auc.svg", "distance.svg", "throughput.svg"):
        assert "</svg>" in (tmp_path / name).read_text()
