from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from bagpipe.config.sections import DataConfig, DataFormat
from bagpipe.errors import InputError
from data.cli import main
from data.formats import FORMATS, open_eval_source, open_source
from tests.data.files import criteo_lines


def test_unknown_names_list_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data.format must be one of avazu-csv, .*, tfrecord, got 'tsv'"):
        open_source(DataConfig(format="tsv"))
    with pytest.raises(InputError, match=r"data.bad_rows must be one of stop, skip, got 'maybe'"):
        open_source(DataConfig(bad_rows="maybe"))


def test_every_format_opens(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(criteo_lines(3))
    schema = tmp_path / "schema.toml"
    schema.write_text('label = "y"\nsparse = ["a"]')
    assert tuple(FORMATS) == get_args(DataFormat)
    assert len(open_source(DataConfig(format="criteo-tsv", path=str(path))).schema.tables) == 26
    assert len(open_source(DataConfig(format="synthetic")).schema.tables) == 26
    schemas = {"csv": str(schema), "tfrecord": str(schema)}
    for name in set(FORMATS) - {"synthetic"}:
        with pytest.raises(InputError, match=r"data.path is empty"):
            open_source(DataConfig(format=name, schema=schemas.get(name, "")))
        with pytest.raises(InputError, match=r"no such file or folder"):
            open_source(DataConfig(format=name, path=str(tmp_path / "missing"), schema=schemas.get(name, "")))


def test_criteo_tables_can_be_overridden_and_nothing_else(tmp_path: Path) -> None:
    path, schema = tmp_path / "a.tsv", tmp_path / "schema.toml"
    path.write_bytes(criteo_lines(3))
    config = DataConfig(format="criteo-tsv", path=str(path), schema=str(schema))
    schema.write_text("[tables.C2]\nrows = 5\nhash = true\ndim = 4")
    assert open_source(config).schema.table("C2").dim == 4
    schema.write_text("label = 'x'")
    with pytest.raises(InputError, match=r"the columns of criteo-tsv are fixed: .* got label"):
        open_source(config)


def test_parser_processes_need_neither_torch_nor_pyarrow() -> None:
    code = (
        "import sys, data, data.worker, data.avazu, data.criteo, data.movielens, data.synthetic; "
        "print({'torch', 'torchrec', 'redis', 'pyarrow'} & set(sys.modules))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_evaluation_files_have_the_columns_of_the_training_files(tmp_path: Path) -> None:
    schema = tmp_path / "s.toml"
    schema.write_text('label = "y"\ndense = ["age"]\nsparse = ["user"]')
    (tmp_path / "train.csv").write_text("y,age,user\n1,2,3\n")
    (tmp_path / "same.csv").write_text("user,y,age,more\n1,1,1,1\n")
    (tmp_path / "other.csv").write_text("y,user\n1,1\n")
    config = DataConfig(path=str(tmp_path / "train.csv"), schema=str(schema), eval_fraction=0.0)
    source = open_source(config)
    assert open_eval_source(config, source) is None
    found = open_eval_source(dataclasses.replace(config, eval_path=str(tmp_path / "same.csv")), source)
    assert found is not None
    assert found.schema == source.schema
    with pytest.raises(InputError, match=r"other.csv:1: expected a column 'age', got none in 'y,user'"):
        open_eval_source(dataclasses.replace(config, eval_path=str(tmp_path / "other.csv")), source)


def test_evaluation_files_with_a_schema_of_their_own(tmp_path: Path) -> None:
    """Columnar files carry their schema, so it can be another one."""
    for name, tables in (("train", 3), ("other", 4)):
        path = str(tmp_path / f"{name}.arrow")
        assert main(["synth", "--out", path, "--rows", "20", "--tables", str(tables)]) == 0
    config = DataConfig(path=str(tmp_path / "train.arrow"), eval_path=str(tmp_path / "other.arrow"))
    with pytest.raises(InputError, match=r"eval_path .*other\.arrow: expected the columns of data\.path, where"):
        open_eval_source(config, open_source(config))
