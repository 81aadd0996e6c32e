from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from bagpipe.config.sections import DataConfig, DataFormat
from bagpipe.errors import InputError
from data.cli import main
from data.formats import FORMATS, open_eval_source, open_source
from data.loader import LookaheadLoader
from data.source import Source
from data.testing import assert_same_batches, check_source, read_all
from tests.data.files import criteo_lines, save_to_disk, write_examples

TARGETS = 'label = ["click", "buy"]\nexample_weight = "w"\ndense = ["age"]\nsparse = ["user"]\n'


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


def _target_rows(rows: int = 40) -> pa.Table:
    rng = np.random.default_rng(3)
    return pa.table(
        {
            "click": rng.integers(0, 2, rows),
            "buy": rng.random(rows).astype(np.float32),
            "w": rng.exponential(size=rows).astype(np.float32),
            "age": np.arange(rows) * 1.0,
            "user": rng.integers(0, 9, rows),
        }
    )


def _write_rows(folder: Path, form: str, table: pa.Table) -> str:
    path = folder / f"rows.{form}"
    if form == "parquet":
        pq.write_table(table, path, row_group_size=9)
    elif form == "csv":
        pyarrow.csv.write_csv(table, path)
    elif form == "huggingface":
        save_to_disk(table, path)
    else:
        write_examples(path, table.to_pylist())
    return str(path)


def _open_rows(folder: Path, form: str, table: pa.Table, **options: bool) -> Source:
    (folder / "rows.toml").write_text(TARGETS)
    path = _write_rows(folder, form, table)
    return open_source(DataConfig(format=form, path=path, schema=str(folder / "rows.toml"), **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["csv", "huggingface", "parquet", "tfrecord"])
def test_several_labels_and_weights_are_read_and_converted(tmp_path: Path, form: str) -> None:
    table = _target_rows()
    source = _open_rows(tmp_path, form, table)
    check_source(source)
    batches = read_all(LookaheadLoader(source, batch_size=16))
    labels = np.stack([table["click"].to_numpy(), table["buy"].to_numpy()], axis=1).astype(np.float32)
    assert np.concatenate([batch.labels for batch in batches]).tobytes() == labels.tobytes()
    weights = np.concatenate([batch.example_weights for batch in batches if batch.example_weights is not None])
    assert weights.tobytes() == table["w"].to_numpy().tobytes()
    assert batches[0].select(np.array([1, 5])).labels.tobytes() == labels[[1, 5]].tobytes()
    for suffix in ("arrow", "parquet"):
        out = str(tmp_path / f"out.{suffix}")
        assert (
            main(
                ["convert", str(tmp_path / f"rows.{form}"), out, "--format", form, "--schema", f"{tmp_path}/rows.toml"]
            )
            == 0
        )
        back = open_source(DataConfig(format="parquet", path=out))
        assert back.schema == source.schema
        options: dict[str, int | bool] = {"batch_size": 16, "shuffle": True, "shuffle_buffer": 20}
        assert_same_batches(read_all(LookaheadLoader(back, batch_size=16)), batches)
        assert len(read_all(LookaheadLoader(back, **options))) == len(batches)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("buy", 1.5, "expected a label in [0, 1] in column 'buy', got 1.5"),
        ("click", -1.0, "expected a label in [0, 1] in column 'click', got -1.0"),
        ("buy", None, "expected a number in column 'buy', got null"),
        ("w", -0.5, "expected a finite weight of at least 0 in column 'w', got -0.5"),
        ("w", float("nan"), "expected a finite weight of at least 0 in column 'w', got nan"),
        ("w", float("inf"), "expected a finite weight of at least 0 in column 'w', got inf"),
        ("w", None, "expected a number in column 'w', got null"),
    ],
)
def test_a_bad_label_or_weight_is_named_or_skipped(
    tmp_path: Path, column: str, value: float | None, message: str
) -> None:
    table = _target_rows()
    values = table[column].cast(pa.float64()).to_pylist()
    values[11] = value
    table = table.set_column(table.schema.get_field_index(column), column, [values])
    source = _open_rows(tmp_path, "parquet", table)
    with pytest.raises(InputError, match=re.escape(f"rows.parquet: row 11 (from 0): {message}") + "$"):
        read_all(LookaheadLoader(source, batch_size=16))
    loader = LookaheadLoader(dataclasses.replace(source, bad_rows="skip"), batch_size=16)  # type: ignore[type-var]
    ages = np.concatenate([batch.dense[:, 0] for batch in read_all(loader)])
    assert ages.tolist() == [age for age in range(40) if age != 11]


@pytest.mark.parametrize("column", ["buy", "w"])
def test_a_missing_label_or_weight_is_named(tmp_path: Path, column: str) -> None:
    for form in ("csv", "parquet"):
        with pytest.raises(InputError, match=f"column '{column}'"):
            _open_rows(tmp_path, form, _target_rows().drop_columns([column]))


def test_synthetic_labels_follow_each_other(tmp_path: Path) -> None:
    schema = tmp_path / "s.toml"
    schema.write_text('label = ["click", "buy"]\nexample_weight = "w"\n[synthetic]\nrows = 20000\n')
    source = open_source(DataConfig(schema=str(schema)), seed=5)
    (batch,) = read_all(LookaheadLoader(source, batch_size=20_000))
    plain = dataclasses.replace(source, schema=dataclasses.replace(source.schema, label="click", example_weight=""))  # type: ignore[type-var]
    (alone,) = read_all(LookaheadLoader(plain, batch_size=20_000))
    assert batch.labels[:, 0].tobytes() == alone.labels.tobytes(), "further columns leave the first alone"
    assert batch.values.tobytes() == alone.values.tobytes()
    assert (batch.labels[:, 1] <= batch.labels[:, 0]).all()
    assert 0.02 < batch.labels[:, 1].mean() < alone.labels.mean()
    assert batch.example_weights is not None
    assert abs(batch.example_weights.mean() - 1) < 0.05
    assert main(["synth", "--schema", str(schema), "--rows", "50", "--out", str(tmp_path / "a.tsv")]) == 2


@pytest.mark.parametrize("form", ["csv", "huggingface", "parquet", "tfrecord"])
def test_data_to_predict_may_lack_labels_and_weights(tmp_path: Path, form: str) -> None:
    whole, lacking = tmp_path / "whole", tmp_path / "lacking"
    whole.mkdir(), lacking.mkdir()
    labelled = _open_rows(whole, form, _target_rows())
    (batch,) = read_all(LookaheadLoader(labelled, batch_size=40))
    table = _target_rows().drop_columns(["click", "w"])
    source = _open_rows(lacking, form, table, unlabelled=True)
    assert source.schema == labelled.schema
    check_source(source)
    (found,) = read_all(LookaheadLoader(source, batch_size=40))
    assert np.isnan(found.labels[:, 0]).all()
    assert found.labels[:, 1].tobytes() == batch.labels[:, 1].tobytes()
    assert found.values.tobytes() == batch.values.tobytes()
    assert found.example_weights is not None
    assert (found.example_weights == 1).all()


def test_a_missing_value_is_no_label_either(tmp_path: Path) -> None:
    table = _target_rows()
    values = table["buy"].to_pylist()
    values[4] = None
    values[6] = 2.0
    table = table.set_column(1, "buy", [values])
    source = _open_rows(tmp_path, "parquet", table, unlabelled=True)
    with pytest.raises(InputError, match=r"row 6 \(from 0\): expected a label in \[0, 1\] in column 'buy', got 2.0"):
        read_all(LookaheadLoader(source, batch_size=40))
    source = _open_rows(tmp_path, "parquet", table)
    with pytest.raises(InputError, match=r"row 4 \(from 0\): expected a number in column 'buy', got null"):
        read_all(LookaheadLoader(source, batch_size=40))
