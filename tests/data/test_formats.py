from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from bagpipe.config.sections import DataConfig, DataFormat
from bagpipe.errors import InputError
from data.formats import FORMATS, open_source
from tests.data.files import criteo_lines


def test_unknown_names_list_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data.format must be one of avazu-csv, .*, parquet, synthetic, got 'tsv'"):
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
    schemas = {"csv": str(schema)}
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
