"""The benchmark harness, and rules for every benchmark."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import FencedError, InputError, JobError
from bagpipe.store.fencing.presence import check_present
from bagpipe.types.schema import RowSchema, RowTable
from benchmarks.harness.benchmark import Benchmark, Measure, Part, Values, found_of, run_benchmark
from benchmarks.harness.click_logs import SAMPLE_VARIABLE, add_data_path, data_notes, data_or_synthetic_notes
from benchmarks.harness.fenced_store import FencedStore
from benchmarks.harness.report import BEGIN, END, fill_in, provenance, table
from benchmarks.harness.results import Results, to_text
from benchmarks.harness.rounds import Spread, paired_ratios, time_rounds, timed, turns

ROOT = Path(__file__).parents[2] / "benchmarks"
NAMES = sorted(path.parent.name for path in ROOT.glob("*/main.py"))


def benchmark_of(name: str) -> Benchmark:
    found: Benchmark = importlib.import_module(f"benchmarks.{name}.main").BENCHMARK
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_has_the_common_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run_benchmark(benchmark_of(name), ["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"python -m benchmarks.{name}.main" in text
    assert all(flag in text for flag in ("--out", "--report", "--rehearse"))


@pytest.mark.parametrize("name", NAMES)
def test_published_tables_are_those_of_the_published_results(name: str) -> None:
    benchmark, folder = benchmark_of(name), ROOT / name
    values = Results.read(folder / "results.json").values
    text = benchmark.tables(values).strip() + "\n\n" + "\n".join(provenance(values))
    between = (folder / "README.md").read_text().split(BEGIN)[1].split(END)[0]
    assert between.strip() == text.strip()
    if benchmark.details is not None:
        assert (folder / "tables.md").read_text() == benchmark.details(values)


@pytest.mark.parametrize("name", NAMES)
def test_published_results_are_written_as_the_harness_writes(name: str) -> None:
    text = (ROOT / name / "results.json").read_text()
    assert to_text(json.loads(text)) == text
    runs = [part.get("run", {}) for part in json.loads(text)["parts"].values()]
    assert not [word for run in runs for word in run.get("command", "").split() if word.startswith("/")]


def test_turns_are_balanced_or_shuffled() -> None:
    assert list(turns("ab", 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    shuffled = list(turns("abcd", 5, shuffle_seed=1))
    assert shuffled == list(turns("abcd", 5, shuffle_seed=1))
    rounds = [[name for number, name in shuffled if number == wanted] for wanted in range(5)]
    assert all(sorted(order) == list("abcd") for order in rounds)
    assert len({tuple(order) for order in rounds}) > 1


def test_warm_up_rounds_do_not_count() -> None:
    calls: list[str] = []
    seconds = time_rounds({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3, warmups=2)
    assert {name: len(found) for name, found in seconds.items()} == {"a": 3, "b": 3}
    assert calls.count("a") == calls.count("b") == 5


def test_timed_is_the_median_and_the_last_result() -> None:
    clock, results = iter([0.0, 5.0, 5.0, 6.0, 6.0, 8.0]), iter("xyz")
    assert timed(lambda: next(results), 3, clock=lambda: next(clock)) == (2.0, "z")


def test_ratios_are_paired_by_round() -> None:
    found = paired_ratios([2.0, 6.0, 30.0], [1.0, 2.0, 30.0])
    assert found == Spread(median=2.0, low_quartile=1.0, high_quartile=3.0, least=1.0, most=3.0)
    with pytest.raises(ValueError, match="zip"):
        paired_ratios([1.0], [1.0, 2.0])


def test_table() -> None:
    assert table(("a", "b"), [(1, None), ("x", 2.5)]) == "| a | b |\n|---|---|\n| 1 |  |\n| x | 2.5 |\n"
    with pytest.raises(ValueError, match="expected 2 cells, got 1"):
        table(("a", "b"), [(1,)])


def test_text_between_the_marks_is_replaced(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    fill_in(readme, "new\n")
    assert readme.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="unpack"):
        fill_in(readme, "new")


def test_a_record_takes_one_line() -> None:
    values = {"machine": {"a": "b"}, "parts": {"p": {"found": [{"x": 1, "y": [1, 2]}, {"x": 2, "y": [3]}]}}}
    text = to_text(values)
    assert json.loads(text) == values
    assert '    {"x": 1, "y": [1, 2]},\n' in text


class Fake:
    """A benchmark of two parts, `good` and `bad`; tests set the error that `bad` raises."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.error: Exception | None = None
        self.benchmark = Benchmark(
            folder=folder,
            about="A question.",
            flags=lambda parser: parser.add_argument("--size", type=int, default=100),
            parts=self.parts,
            tables=self.tables,
            rehearsal={"size": 1},
            packages=(),
        )
        folder.mkdir()
        (folder / "README.md").write_text(f"# Question\n{BEGIN}\n{END}\n")

    def parts(self, options: argparse.Namespace) -> Mapping[str, Measure]:
        if options.size < 0:
            raise InputError(f"--size must be positive, got {options.size}")

        def good(part: Part) -> None:
            part.add({"size": options.size})
            part.add({"size": options.size + 1})

        def bad(part: Part) -> None:
            if self.error is not None:
                raise self.error
            part.keep("fine")

        return {"good": good, "bad": bad}

    def tables(self, values: Values) -> str:
        return f"sizes {found_of(values, 'good')}, {found_of(values, 'bad')}"

    def run(self, *words: str) -> int:
        return run_benchmark(self.benchmark, words)

    @property
    def readme(self) -> str:
        return (self.folder / "README.md").read_text()


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path / "question")


def test_a_run_publishes(fake: Fake) -> None:
    assert fake.run() == 0
    assert "sizes [{'size': 100}, {'size': 101}], fine" in fake.readme
    assert "`python -m benchmarks.question.main`" in fake.readme
    (part,) = {json.dumps(part["run"]) for part in Results.read(fake.folder / "results.json").parts.values()}
    assert json.loads(part)["settings"] == {"size": 100}


def test_a_rehearsal_is_small_and_not_published(fake: Fake) -> None:
    before = fake.readme
    assert fake.run("--rehearse") == 0
    assert fake.readme == before
    text = (fake.folder / "rehearsal" / "tables.md").read_text()
    assert "[{'size': 1}, {'size': 2}]" in text
    assert "no measurements" in text
    assert fake.run("--rehearse", "--size", "7") == 0
    assert "[{'size': 7}" in (fake.folder / "rehearsal" / "tables.md").read_text()


def test_out_keeps_the_published_results(fake: Fake, tmp_path: Path) -> None:
    before = fake.readme
    assert fake.run("--out", str(tmp_path / "out")) == 0
    assert fake.readme == before
    (run,) = {part["run"]["command"] for part in Results.read(tmp_path / "out" / "results.json").parts.values()}
    assert run == "python -m benchmarks.question.main --out out"  # folders are this machine's own


def test_report_measures_nothing(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert fake.run("--report") == 2
    assert "expected results" in capsys.readouterr().err
    assert fake.run() == 0
    published = fake.readme
    (fake.folder / "README.md").write_text(f"# Question\n{BEGIN}\n{END}\n")
    fake.error = JobError("not called")
    assert fake.run("--report") == 0
    assert fake.readme == published


@pytest.mark.parametrize("counts", [False, True])
def test_counts_of_another_machine_are_kept(fake: Fake, monkeypatch: pytest.MonkeyPatch, counts: bool) -> None:
    fake.benchmark = dataclasses.replace(fake.benchmark, counts=counts)
    assert fake.run() == 0
    path = fake.folder / "results.json"
    path.write_text(path.read_text().replace('"good": {', '"elsewhere": {'))
    monkeypatch.setattr("platform.release", lambda: "another")
    assert fake.run() == 0
    assert ("elsewhere" in Results.read(path).parts) is counts


def test_wrong_flags_change_nothing(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert fake.run("--size", "-1") == 2
    assert capsys.readouterr().err == "question: --size must be positive, got -1\n"
    assert not (fake.folder / "results.json").exists()


@pytest.mark.parametrize(
    ("error", "code"), [(JobError("no job"), 1), (RuntimeError("a bug"), 1), (InputError("no data"), 2)]
)
def test_a_failing_part_keeps_all_earlier_results(fake: Fake, error: Exception, code: int) -> None:
    fake.error = error
    assert fake.run() == code
    assert f"Part bad failed: {type(error).__name__}: {error}" in fake.readme
    fake.error = None
    assert fake.run() == 0
    assert "failed" not in fake.readme
    fake.error = error
    assert fake.run("--size", "5") == code
    assert "sizes [{'size': 5}, {'size': 6}], fine" in fake.readme


#: Modules that open rows of a server, or give a store its fence.
WRITERS = {"bagpipe.store.open", "bagpipe.store.redis.store", "bagpipe.testing.fence_jobs", "bagpipe.jobs.open_job"}


def test_benchmarks_open_rows_in_the_harness_alone() -> None:
    """Else a run could write without the fence of a job. benchmarks/store compares writes with and without it."""
    allowed = {"harness/fenced_store.py", "harness/job.py"}
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name not in allowed and not name.startswith("store/"):
            nodes = ast.walk(ast.parse(path.read_text()))
            imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
            assert not imported & WRITERS, f"{name}: open the store by benchmarks.harness"


@pytest.mark.redis
def test_a_store_of_the_harness_has_a_fence(valkey_url: str) -> None:
    schema = RowSchema(tables=(RowTable(name="t", dim=1),), optimizer="sgd")
    ids = np.arange(5)
    with FencedStore(valkey_url, schema=schema, namespace="bench") as store, store.ledger() as ledger:
        store.write(0, ids, np.ones((5, 1), np.float32))
        assert sum(log.num_groups for state in ledger.state() for log in state.logs) > 0
        with FencedStore(valkey_url, schema=schema, namespace="bench"), pytest.raises(FencedError):
            store.write(0, ids, np.zeros((5, 1), np.float32))
        assert store.read(0, ids).rows.sum() == 5
        # A job trains these rows on, as `open_engine` asks.
        check_present(ledger.state(), ledger.job(), namespace="bench")


def test_the_file_of_click_logs_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SAMPLE_VARIABLE, "/data/day.tsv")
    parser = argparse.ArgumentParser()
    add_data_path(parser)
    given, none = parser.parse_args([]), argparse.Namespace(path="", examples=2000)
    assert given.path == "/data/day.tsv"
    for notes in (data_notes, data_or_synthetic_notes):
        assert notes(given) == {"notes": ["data day.tsv"]}
    assert data_notes(none) == {"notes": []}
    assert data_or_synthetic_notes(none) == {"notes": ["data synthetic, 2,000 examples"]}
