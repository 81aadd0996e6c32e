"""Merged results of several `benchmarks/gpu` runs: only parts of the same machine are kept, and each names its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bagpipe.errors import InputError
from benchmarks.gpu.report import checks, tables
from benchmarks.harness.report import provenance
from benchmarks.harness.results import Results

BASIS: dict[str, Any] = {
    "rehearsed": False,
    "machine": {"device type": "cuda", "device": "a card", "versions": "torch 2.13"},
}
SIZES = {"batch_size": 8, "dim": 4, "rows_optimizer": "sgd", "lookahead": 2, "measured_steps": 2, "warmup_steps": 1}
STEPS = {
    "total_rows": 90, "cache_rows": 9, "plan_s": 0.01, "resident_s": {"ours": 0.002}, "resident_again_s": {},
    "missing": {}, "cached": {"process memory": {
        "step_p50_s": 0.0021, "rows_fetched": 3.0, "rows_written": 3.0, "exposed_s": 0.0, "loss": 0.5, "lanes_s": {},
    }},
}  # fmt: skip
FEED = {
    "rows_unique": 9.0, "rows_fetched": 3.0, "rows_evicted": 3.0, "plan_s": 0.01, "prepare_s": 0.01, "stores": {},
    "missing": {},
}  # fmt: skip


def run(code: str, **sizes: object) -> dict[str, Any]:
    return {
        "settings": {"parts": [code], **SIZES, **sizes}, "code": code, "load average": "0.1 0.2 0.3",
        "notes": [f"nothing, says {code}"], "copy_bytes_per_s": 4e12,
    }  # fmt: skip


def measure(results: Results, part: str, found: object, *, code: str, **sizes: object) -> None:
    results.begin(part, run(code, **sizes))
    results.put(part, found)
    results.end(part, 3.4)


def report(results: Results) -> str:
    return tables(results.values) + "\n".join(provenance(results.values))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Results file with the steps of an earlier run."""
    path = tmp_path / "results.json"
    results, line = Results.on(path, BASIS)
    assert line is None
    measure(results, "steps", STEPS, code="earlier")
    return path


def test_measuring_one_part_keeps_the_others(path: Path) -> None:
    results, line = Results.on(path, BASIS)
    assert line is None
    measure(results, "feed", FEED, code="later")
    found = Results.read(path)
    assert found.values == results.values
    text = report(found)
    assert "| all resident, ours | 2.00 |" in text
    assert "| the GPU, all rows resident | 500.0 |" in text
    for line in ("* steps: code earlier", "* feed: code later", "; nothing, says later"):
        assert line in text
    assert "1.05, pass" in checks(found.values)[0]


def test_a_part_measured_again_is_replaced(path: Path) -> None:
    results, _ = Results.on(path, BASIS)
    results.begin("steps", run("later"))
    text = report(Results.read(path))
    assert "earlier" not in text
    assert "Part steps was interrupted" in text
    results.end("steps", 1.0, "ValueError: no")
    text = report(Results.read(path))
    assert "Part steps failed: ValueError: no" in text
    assert "interrupted" not in text


def test_sizes_that_differ_are_not_compared(path: Path) -> None:
    results, _ = Results.on(path, BASIS)
    measure(results, "feed", FEED, code="later", dim=16)
    assert "the GPU, all rows resident" not in tables(results.values)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"machine": {**BASIS["machine"], "device": "another"}}, "device is 'another', there it is 'a card'"),
        ({"machine": {**BASIS["machine"], "versions": "torch 2.12"}}, "versions is 'torch 2.12'"),
        ({"rehearsed": True}, "rehearsed is True"),
    ],
)
def test_results_of_another_machine_are_dropped(path: Path, change: dict[str, Any], said: str) -> None:
    results, line = Results.on(path, {**BASIS, **change})
    assert line is not None
    assert said in line
    assert "starting empty, without its steps" in line
    assert results.parts == {}


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_an_invalid_results_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(InputError, match="expected results of this benchmark"):
        Results.read(path)
    results, line = Results.on(path, BASIS)
    assert line is not None
    assert "starting empty" in line
    assert results.values == {**BASIS, "parts": {}}
