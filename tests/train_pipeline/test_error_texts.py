"""Errors that leave a pipeline name its arguments: every text that its code can raise, and some that it raises."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import bagpipe
from bagpipe.config.keys import config_keys
from bagpipe.errors import InputError, JobError, StoreError
from bagpipe.train_pipeline.error_texts import ARGUMENTS, PHRASES, in_arguments, text_in_arguments
from bagpipe.train_pipeline.options import Options
from tests.train_pipeline.small import ROWS, batches, pipeline, progress_all

ROOT = Path(__file__).parents[2]

#: Modules whose code runs in a pipeline: these and all that they import. The second is the planner's process.
STARTS = ("bagpipe.train_pipeline.pipeline", "bagpipe.lookahead.child")

#: Texts of the training program that `pushed` leaves out, in bagpipe/errors.py.
OWN_VARIANT = {"lower data.batch_size", "cache.rows"}


@cache
def _texts() -> frozenset[str]:
    """String constants of all modules of a pipeline, without docstrings."""
    found: set[str] = set()
    for path in _modules():
        tree = ast.parse(path.read_text())
        bodies = [node.body for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        docs = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                found.add(node.value)
    return frozenset(found)


def _modules() -> Iterator[Path]:
    seen: set[Path] = set()
    left = list(STARTS)
    while left:
        stem = ROOT / Path(*left.pop().split("."))
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.exists() and path not in seen and path.name != "error_texts.py":
                seen.add(path)
                yield path
                left += _imported(path)


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("bagpipe"):
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_no_text_of_a_pipeline_names_a_configuration_key() -> None:
    keys = re.compile("|".join(rf"(?<![\w.]){re.escape(key.path)}\b" for key in config_keys()))
    assert len(_texts()) > 1000
    named = {text for text in _texts() if keys.search(text)}
    assert len(named) > 50
    assert [text for text in named if keys.search(text_in_arguments(text))] == []


def test_the_tables_name_nothing_that_does_not_occur() -> None:
    whole = "\n".join(_texts())
    assert [key for key in (*ARGUMENTS, *PHRASES) if key not in whole and key not in OWN_VARIANT] == []


def test_single_words_are_arguments() -> None:
    known = {
        *inspect.signature(bagpipe.TrainPipeline).parameters,
        *(field.name for field in dataclasses.fields(Options)),
    }
    words = {word for word in ARGUMENTS.values() if " " not in word and word != "folder"}
    assert words <= known


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("set store.existing to reset", "set existing to reset"),
        ("use another checkpoint.dir, or checkpoint.resume=never", 'use another checkpoint_dir, or resume="never"'),
        ("take over with checkpoint.take_over=true", "take over with take_over=True"),
        ("(run.nonfinite = skip leaves such batches out)", '(nonfinite="skip" leaves such batches out)'),
        ("within store.timeout_s = 30 s", "within timeout_s = 30 s"),
        ("batch 2, table number 1: expected", "batch 2, table 'b': expected"),
        ("table number 7", "table number 7"),
        ("in /data/store.url and store.url.txt", "in /data/store.url and store.url.txt"),
    ],
)
def test_texts(text: str, expected: str) -> None:
    assert text_in_arguments(text, ["a", "b"]) == expected


def test_causes_are_changed_and_errors_of_others_are_not() -> None:
    error, cause, other = JobError("see run.seed"), StoreError("see store.url"), ValueError("store.url")
    error.__cause__, cause.__cause__ = cause, other
    in_arguments(error)
    assert [str(each) for each in (error, cause, other)] == ["see seed", "see store", "store.url"]


def _message(kind: type[Exception], **more: Any) -> str:
    with pytest.raises(kind) as raised, pipeline(**more) as trained:
        progress_all(trained, iter(batches(3)))
    return str(raised.value)


def test_errors_of_the_store_and_of_training() -> None:
    with pipeline(store="memory://texts") as trained:
        progress_all(trained, iter(batches(2)))
    text = _message(InputError, store="memory://texts")
    assert "set existing to rows-only" in text
    assert "another namespace" in text
    assert text.startswith("namespace 'bagpipe' holds")
    other = _message(InputError, store="memory://texts", rows=bagpipe.optim.SGD(0.1))
    assert other.endswith('use another namespace, or delete its rows with existing="reset"')
    assert _message(InputError, namespace="a b").startswith("namespace must be")
    assert _message(InputError, store="http://x").startswith("store must begin with")
    nan = batches(1)
    nan[0]["labels"][0] = float("nan")
    with pipeline() as trained, pytest.raises(JobError, match='nonfinite="skip" leaves'):
        trained.progress(iter(nan))


def test_errors_of_rows_evaluation_and_construction() -> None:
    with pipeline() as trained:
        with pytest.raises(InputError, match="table 't_f0': expected ids in"):
            trained.rows("t_f0")[[ROWS]]
        bad = batches(1)
        bad[0]["ids"].values()[0] = ROWS
        with pytest.raises(InputError, match="table 't_f0': expected ids in"):
            list(trained.evaluate(bad))
    with pytest.raises(InputError, match=r"^row_dtype of table 't_f0' must be one of float32"):
        pipeline(row_dtype={"t_f0": "int8"})


def test_a_checkpoint_folder_of_another_model(tmp_path: Path) -> None:
    with pipeline(checkpoint_dir=str(tmp_path)) as trained:
        progress_all(trained, iter(batches(2)))
    with pytest.raises(InputError, match='use another checkpoint_dir, or resume="never"'):
        pipeline(checkpoint_dir=str(tmp_path), rows=bagpipe.optim.SGD(0.1)).train(batches(1)).__next__()
