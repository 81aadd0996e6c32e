"""The recipes of benchmarks/bars: each configuration trains one batch of generated data in its dataset's layout."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bagpipe.config.load import parse_config
from bagpipe.store.memory.store import MemoryStore
from bagpipe.testing.plain_job import plan_rank_batches
from data.formats import open_source
from data.loader import open_loader
from tests.effort import some_of
from trainer.assembly import build_engine, build_training_model

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "benchmarks" / "bars" / "recipes"
NUMBERS, STRINGS = [f"I{number}" for number in range(1, 14)], [f"C{number}" for number in range(1, 27)]
FRAPPE = ["user", "item", "daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city"]

#: Columns of train.csv, valid.csv and test.csv, and a value of each kind, as the datasets' pages show them.
LAYOUTS = {
    "criteo_x1": ["label", *NUMBERS, *STRINGS],
    "criteo_x4": ["id", "Label", *NUMBERS, *STRINGS],
    "frappe_x1": ["label", *FRAPPE],
}
NUM_EXAMPLES = 64


def cell(dataset: str, column: str, draw: random.Random) -> str:
    if column.lower() == "label":
        return str(draw.randrange(2))
    if dataset == "criteo_x1" and column.startswith("I"):
        return f"{draw.random():.6f}"
    if dataset == "criteo_x4" and column in (*NUMBERS, *STRINGS):
        if draw.random() < 0.1:
            return ""
        return str(draw.randrange(-2, 5000)) if column in NUMBERS else f"{draw.randrange(3):08x}"
    return str(draw.randrange(1, 5000))


@pytest.fixture(scope="module", params=sorted(LAYOUTS))
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Name of a dataset, and the folder with its files after prepare.sh."""
    dataset, folder = request.param, tmp_path_factory.mktemp(request.param)
    draw = random.Random(0)
    for part in ("train", "valid", "test"):
        rows = [[cell(dataset, column, draw) for column in LAYOUTS[dataset]] for _ in range(NUM_EXAMPLES)]
        (folder / f"{part}.csv").write_text("\n".join(map(",".join, [LAYOUTS[dataset], *rows])) + "\n")
    done = subprocess.run(
        [str(RECIPES / "prepare.sh"), dataset, str(folder)],
        env={**os.environ, "PYTHON": sys.executable},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dataset, folder


@pytest.mark.parametrize("model", some_of(["dcnv2", "deepfm", "finalmlp"], {2}))
def test_a_recipe_trains_a_batch(prepared: tuple[str, Path], model: str) -> None:
    dataset, folder = prepared
    files = [f"--data.{key}={folder / part}.arrow" for key, part in (("path", "train"), ("eval_path", "valid"))]
    config = parse_config(["--config", str(RECIPES / dataset / f"{model}.toml"), *files], "trainer").config
    assert config.data.has_evaluation
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, rows=10_000))  # for the memory
    with open_loader(config.data, seed=config.run.seed) as loader:
        batches = list(loader)[:1]
    assert [batch.num_examples for batch in batches] == [NUM_EXAMPLES]
    built = build_training_model(config, open_source(config.data, config.run.seed).schema)
    with MemoryStore(built.rows) as store:
        progress = build_engine(built, store).train(plan_rank_batches(batches, built.spec)).progress
    assert progress.steps == 1
    assert 0.1 < float(progress.loss_sum) / progress.samples < 3


def test_the_rare_strings_of_criteo_x4_share_a_row(prepared: tuple[str, Path]) -> None:
    dataset, folder = prepared
    lines = [len(path.read_text().splitlines()) for path in folder.glob("*.dictionary.csv")]
    assert lines == ([] if dataset != "criteo_x4" else [5] * len(STRINGS))
