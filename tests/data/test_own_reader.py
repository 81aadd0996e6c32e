"""The reader of `examples/`, and the documentation's claims about it."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from bagpipe.util.program import run_program
from data.formats import open_source
from data.loader import LookaheadLoader
from data.testing import assert_same_batches, check_source, read_all
from examples.own_reader import JsonLinesSource, id_of, main

ROOT = Path(__file__).parents[2]

ROWS = [
    {"clicked": 1, "price": 3.5, "user": "u17", "tags": ["new", "red"]},
    {"clicked": 0, "user": "u4"},
    {"clicked": 0, "price": None, "tags": ["red"]},
    {"clicked": 0, "user": None, "tags": None},
] * 9


def write(path: Path, *lines: str) -> JsonLinesSource:
    path.write_text("\n".join(lines))
    return JsonLinesSource(files=(str(path),))


def test_it_keeps_a_readers_promises(tmp_path: Path) -> None:
    source = write(tmp_path / "clicks.jsonl", *map(json.dumps, ROWS))
    first = read_all(LookaheadLoader(source, batch_size=4))[0]
    assert first.labels.tolist() == [1, 0, 0, 0]
    assert first.dense.tolist() == [[3.5], [0], [0], [0]]
    assert first.lengths.tolist() == [[1, 1, 0, 0], [2, 0, 1, 0]]
    assert first.values.tolist() == [id_of(text) for text in ("u17", "u4", "new", "red", "red")]
    check_source(source)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "bad.jsonl", '{"clicked": 1}', "{}")
    with pytest.raises(InputError, match=re.escape(f"{tmp_path}/bad.jsonl:2: expected an object with a number")):
        read_all(LookaheadLoader(source, batch_size=3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a file to read and an .arrow file to write, got 0 arguments"),
        (["none.jsonl", "out.arrow"], "none.jsonl: no such file"),
    ],
)
def test_its_program_ends_in_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run_program(main, arguments) == 2
    assert message in capsys.readouterr().err


def test_its_program_writes_the_columnar_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "clicks.jsonl", *map(json.dumps, ROWS))
    out = str(tmp_path / "clicks.arrow")
    monkeypatch.setattr(sys, "argv", ["own_reader", source.files[0], out])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples/own_reader.py"), run_name="__main__")
    assert ended.value.code == 0
    converted = LookaheadLoader(open_source(DataConfig(format="parquet", path=out)), batch_size=10)
    assert_same_batches(read_all(converted), read_all(LookaheadLoader(source, batch_size=10)))


def test_the_documented_steps_for_parquet(tmp_path: Path) -> None:
    """The code blocks of the documentation, run as they are written."""
    text = (ROOT / "docs/data-formats.md").read_text(encoding="utf-8").split("## Bring your own data", 1)[1]
    code, schema = (re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "toml"))
    assert code is not None
    assert schema is not None
    monkeypatched = code[1].replace('"clicks.parquet"', repr(str(tmp_path / "clicks.parquet")))
    exec(compile(monkeypatched, "docs/data-formats.md", "exec"), {})
    (tmp_path / "clicks.toml").write_text(schema[1])
    source = open_source(
        DataConfig(format="parquet", path=str(tmp_path / "clicks.parquet"), schema=str(tmp_path / "clicks.toml"))
    )
    (batch,) = read_all(LookaheadLoader(source, batch_size=10))
    assert batch.lengths.tolist() == [[1, 1, 0], [1, 1, 1], [2, 0, 3], [1, 1, 1]]
    assert batch.weights is not None
    np.testing.assert_array_equal(batch.weights[5:], np.array([0.5, 0.25, 1.0, 1.0, 2.0, 1, 1, 1], np.float32))
