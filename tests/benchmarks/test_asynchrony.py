"""Data, records and pictures of benchmarks/asynchrony."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

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
