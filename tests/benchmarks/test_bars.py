"""benchmarks/bars without FuxiCTR: the split, the values handed to its models, the journal, the tables."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from bagpipe.errors import InputError
from benchmarks.bars.journal import Journal
from benchmarks.bars.main import runs_of
from benchmarks.bars.ours import flags_of
from benchmarks.bars.prepare import NUMBERS, PARTS, STRINGS, prepare
from benchmarks.bars.report import tables
from benchmarks.bars.same_start import JobOfOurs
from benchmarks.bars.settings import MODELS, Outcome, Run

NUM_EXAMPLES = 200
RUN = Run(system="ours", model="DCNv2", optimizer="adam", seed=3)


@pytest.fixture(scope="module")
def log() -> list[list[str]]:
    """Cells of a day file; some are missing."""
    draw = random.Random(1)
    texts = [["", *(f"{code:x}" for code in range(column + 1))] for column in range(len(STRINGS))]
    return [
        [
            str(draw.randrange(2)),
            *(draw.choice(["", "-1", str(draw.randrange(1000))]) for _ in NUMBERS),
            *(draw.choice(choices) for choices in texts),
        ]
        for _ in range(NUM_EXAMPLES)
    ]


@pytest.fixture(scope="module")
def folder(log: list[list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bars")
    (folder / "day").write_text("".join("\t".join(cells) + "\n" for cells in log))
    prepared = prepare(folder / "day", folder / "data", min_count=10, shares=(0.7, 0.1, 0.2))
    assert prepared.num_examples == {"train": 140, "valid": 20, "test": 40}
    return folder / "data"


def test_both_systems_get_the_same_ids_and_numbers(folder: Path) -> None:
    features = json.loads((folder / "fuxictr" / "feature_map.json").read_text())["features"]
    sizes = {name: spec.get("vocab_size") for feature in features for name, spec in feature.items()}
    assert list(sizes) == [*NUMBERS, *STRINGS]
    for part in PARTS:
        table, arrays = pq.read_table(folder / "ours" / f"{part}.parquet"), np.load(folder / "fuxictr" / f"{part}.npz")
        assert set(table.column_names) == set(arrays.files) == {"label", *NUMBERS, *STRINGS}
        for name in table.column_names:
            np.testing.assert_array_equal(table[name].to_numpy(), arrays[name])
        assert all(arrays[name].max() < sizes[name] for name in STRINGS)


def test_ids_are_ranks_of_strings_and_numbers_are_scaled_logarithms(log: list[list[str]], folder: Path) -> None:
    arrays = {
        name: np.concatenate([np.load(folder / "fuxictr" / f"{part}.npz")[name] for part in PARTS])
        for name in ("label", "I2", "C12")
    }
    assert arrays["label"].tolist() == [float(cells[0]) for cells in log]
    texts = [cells[1 + len(NUMBERS) + 11] for cells in log]
    counts = {text: texts[:140].count(text) for text in texts}
    ranked = sorted((text for text in counts if counts[text] >= 10), key=lambda text: (-counts[text], text))
    ids = {text: number for number, text in enumerate(ranked, start=1)}
    assert 0 < len(ids) < len(counts)
    assert arrays["C12"].tolist() == [ids.get(text, 0) for text in texts]
    numbers = np.log1p([max(0, int(cells[2] or 0)) for cells in log])
    np.testing.assert_array_equal(arrays["I2"], (numbers / numbers[:140].max()).astype(np.float32))


@pytest.mark.parametrize(
    ("text", "said"), [("1\t2\n", "column"), ("0" + "\t" * 39 + "\n", "expected examples in each")]
)
def test_a_file_that_cannot_be_split_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "day").write_text(text)
    with pytest.raises(InputError, match=said):
        prepare(tmp_path / "day", tmp_path / "data", min_count=1, shares=(0.7, 0.1, 0.2))


@pytest.mark.parametrize("model", MODELS)
def test_the_initial_values_are_all_parameters(folder: Path, tmp_path: Path, model: str) -> None:
    run = Run(system="lazy", model=model, optimizer="adam", seed=3, epochs=2, dropout=0.0, same_start=True)
    job = JobOfOurs.of(model, flags_of(run, folder))
    job.write(tmp_path)
    initial, batches = np.load(tmp_path / "initial.npz"), np.load(tmp_path / "batches.npz")
    assert sum(initial[name].size for name in initial.files) == job.parameters
    train = np.load(folder / "fuxictr" / "train.npz")
    assert batches["sizes"].tolist() == [len(train["label"])] * run.epochs
    expected = np.lexsort([train[name] for name in train.files])
    for epoch in range(run.epochs):
        rows = {name: batches[name][epoch * 140 : (epoch + 1) * 140] for name in train.files}
        order = np.lexsort([rows[name] for name in train.files])
        for name in train.files:
            np.testing.assert_array_equal(rows[name][order], train[name][expected])


def test_the_journal_goes_on_behind_a_cut_line(tmp_path: Path) -> None:
    path, measured = tmp_path / "runs.jsonl", []

    def measure(run: Run) -> Outcome:
        measured.append(run)
        return Outcome(auc=0.5 + run.seed / 10, logloss=0.1, history=[0.5])

    first = [Journal(path, "data").get(run, measure) for run in (RUN, RUN)]
    assert first[0] == first[1]
    with path.open("a") as file:
        file.write('{"basis": "da')
    journal = Journal(path, "data")
    assert journal.get(RUN, measure) == first[0]
    assert len(measured) == 1
    assert journal.get(dataclasses.replace(RUN, seed=4), measure).auc == 0.9
    assert Journal(path, "other data").get(RUN, measure) == first[0]
    assert len(measured) == 3


def test_tables_name_a_missed_target() -> None:
    aucs = {"fuxictr": 0.7, "all-rows": 0.701, "sparse-adam": 0.701, "lazy": 0.703, "ours": 0.703}

    def part(name: str) -> list[dict[str, Any]]:
        plain = {"logloss": 0.1, "history": [0.6, 0.7], "parameters": 9, "seconds": 1.0}
        return [
            {"run": dataclasses.asdict(run), "outcome": {"auc": aucs[run.system], **plain}}
            for run in runs_of(name, list(MODELS), 2)
        ]

    text = tables({"parts": {name: {"found": part(name)} for name in ("adam", "adagrad", "own-starts")}})
    assert text.count("+3.0e-03 ± 0e+00 | at most 0.002: missed | 3.0e-03") == 6
    assert text.count("| 3.0e-03 | 0.70100 ± 0.00000 | 0.0e+00 | 0.0e+00 |") == 3
    assert text.count("+0.0030 ± 0.0000") == 3
