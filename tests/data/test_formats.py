from __future__ import annotations

import dataclasses
import gzip
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from bagpipe.config.sections import DataConfig, DataFormat
from bagpipe.errors import InputError
from data.cli import main
from data.formats import FORMATS, check_test_source, open_eval_source, open_source
from data.loader import LookaheadLoader
from data.source import Source
from data.testing import assert_same_batches, check_source, read_all
from tests.data.files import avazu_csv, avazu_rows, criteo_lines, save_to_disk, write_examples

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


def _write_two(form: str, folder: Path, place: str) -> str:
    """Three examples of a format in `folder`, and three more in its folder `place`."""
    schema = folder.parent / "s.toml"
    schema.write_text('label = "click"\nsparse = ["user"]\n')
    table = pa.table({"click": [1, 0, 1], "user": [7, 8, 9]})
    for number, where in enumerate((folder, folder / place)):
        where.mkdir(parents=True, exist_ok=True)
        if form == "criteo-tsv":
            (where / f"day_{number}").write_bytes(criteo_lines(3))
        elif form == "avazu-csv":
            (where / f"{number}.csv").write_bytes(avazu_csv(avazu_rows(3)))
        elif form == "csv":
            pyarrow.csv.write_csv(table, where / f"{number}.csv")
        elif form == "parquet":
            pq.write_table(table, where / f"part-{number}.parquet")
        elif form == "tfrecord":
            write_examples(where / f"{number}.tfrecord", table.to_pylist())
        elif form == "mlperf-npz":
            for name, array in (
                ("dense", np.zeros((3, 1))),
                ("labels", np.zeros(3)),
                ("sparse", np.zeros((3, 1), int)),
            ):
                np.save(where / f"day_{number}_{name}.npy", array)
        elif number == 0:  # movielens reads one file of ratings
            (where / "u.data").write_text("1\t2\t3\t978300760\n" * 3)
    return str(schema) if form in ("csv", "parquet", "tfrecord") else ""


FOLDERS: list[DataFormat] = ["avazu-csv", "criteo-tsv", "csv", "mlperf-npz", "movielens", "parquet", "tfrecord"]


@pytest.mark.parametrize("form", FOLDERS)
def test_no_file_of_a_folder_is_left_out_without_a_word(
    tmp_path: Path, form: DataFormat, caplog: pytest.LogCaptureFixture
) -> None:
    """Partitions are read, links to nothing refused, other folders named; so for evaluation and for tests."""
    folder = tmp_path / "days"
    schema = _write_two(form, folder, "dt=1")
    config = DataConfig(format=form, path=str(folder), schema=schema, eval_fraction=0.0)
    one = form == "movielens"
    assert len(_labels(open_source(config))) == (3 if one else 6)
    assert not caplog.messages
    (folder / "old").mkdir()
    (folder / "old" / "more").write_text("x")
    expected = len(_labels(open_source(config)))
    assert [text.partition(" (")[0] for text in caplog.messages] == [f"{folder}: left out: old/"]
    assert expected == (3 if one else 6)
    for key, messages in _told_of_held_out(config, caplog):
        assert messages[0].startswith(f"{folder}: left out: old/ (")
        assert messages[-1].startswith(f"data.{key} {folder}: "), "a file that is trained on too"
    (folder / "new").symlink_to(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"days/new: expected a file, got a link to nothing"):
        open_source(config)


@pytest.mark.parametrize("form", FOLDERS)
def test_copies_beside_their_files_are_left_out_with_a_word(
    tmp_path: Path, form: DataFormat, caplog: pytest.LogCaptureFixture
) -> None:
    """Of training, evaluation and test folders: their examples would count twice."""
    folder = tmp_path / "days"
    schema = _write_two(form, folder, "dt=1")
    config = DataConfig(format=form, path=str(folder), schema=schema, eval_fraction=0.0)
    expected = _labels(open_source(config))
    assert not caplog.messages
    first, *_ = sorted(path.name for path in folder.iterdir() if path.is_file())
    for ending in (".bak", ".tmp", "~", ".~1~", ".gz"):
        content = (folder / first).read_bytes()
        (folder / f"{first}{ending}").write_bytes(gzip.compress(content) if ending == ".gz" else content)
    assert _labels(open_source(config)) == expected
    told = f"{folder}: left out: {first}.bak, {first}.gz, {first}.tmp, {first}.~1~, {first}~ (copies"
    assert [text[: len(told)] for text in caplog.messages] == [told]
    for _, messages in _told_of_held_out(config, caplog):
        assert messages[0].startswith(told)


def _told_of_held_out(config: DataConfig, caplog: pytest.LogCaptureFixture) -> Iterator[tuple[str, list[str]]]:
    """By key, what is told of the folder as evaluation and as test data, where a part of it is trained on."""
    part = "u.data" if config.format == "movielens" else "dt=1"
    training = dataclasses.replace(config, path=str(Path(config.path) / part))
    source = open_source(training)
    caplog.clear()
    open_eval_source(dataclasses.replace(training, eval_path=config.path), source)
    yield "eval_path", [*caplog.messages]
    caplog.clear()
    check_test_source(dataclasses.replace(training, test_path=config.path), source)
    yield "test_path", [*caplog.messages]


def _labels(source: Source) -> list[float]:
    batches = read_all(LookaheadLoader(source, batch_size=100))
    return [label for batch in batches for label in batch.labels.tolist()]


def test_columnar_files_are_known_by_their_content(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "days"
    schema = _write_two("parquet", folder, "dt=1")
    (folder / "s.toml").write_text(Path(schema).read_text())
    content = (folder / "part-0.parquet").read_bytes()
    for name in ("part-1.pq", "000000_0", "part-2.PARQUET", "part-3"):
        (folder / name).write_bytes(content)
    pyarrow.feather.write_feather(pq.read_table(folder / "part-0.parquet"), folder / "more.ipc", compression="lz4")
    config = DataConfig(path=str(folder), schema=str(folder / "s.toml"))
    assert len(_labels(open_source(config))) == 7 * 3
    (told,) = caplog.messages  # not the schema file, which is no data
    assert told == f"{folder}: read too, as they begin like Parquet or Arrow files: more.ipc, part-3, 000000_0"
    caplog.clear()
    (folder / "README").write_text("about")
    (folder / "old.parquet.gz").write_bytes(gzip.compress(content))
    assert len(_labels(open_source(config))) == 7 * 3
    told = caplog.messages[-1]
    assert told.startswith(f"{folder}: left out: README, old.parquet.gz (")
    (folder / "part-4.Parquet").write_bytes(b"about")
    with pytest.raises(InputError, match=r"part-4.Parquet: expected a parquet or Arrow IPC file"):
        open_source(config).segments()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "README").write_text("about")
    with pytest.raises(InputError, match="the folder holds no parquet or Arrow file, got README"):
        open_source(dataclasses.replace(config, path=str(tmp_path / "texts"), format="parquet"))


def test_a_table_whose_log_says_which_files_count_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    schema = _write_two("parquet", tmp_path / "days", "dt=1")
    (tmp_path / "days" / "_delta_log").mkdir()
    assert len(_labels(open_source(DataConfig(path=str(tmp_path / "days"), schema=schema)))) == 6
    assert "a table of Delta Lake: its files are read as they are" in caplog.text


@pytest.mark.parametrize(("name", "form"), [("ratings.csv", "movielens"), ("day_7_labels.npy", "mlperf-npz")])
def test_files_that_belong_to_no_data_are_refused(tmp_path: Path, name: str, form: str) -> None:
    """A second file of ratings, and an array without those of its day."""
    _write_two(form, tmp_path / "days", "dt=1")
    (tmp_path / "days" / "dt=1" / name).write_text("x")
    with pytest.raises(
        InputError, match=r"got dt=1/ratings.csv and u.data|day_7_dense.npy: no such file, which belong"
    ):
        open_source(DataConfig(format=form, path=str(tmp_path / "days")))  # type: ignore[arg-type]
