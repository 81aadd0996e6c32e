"""Each format as its files begin, and what is none."""

import bz2
import gzip
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from bagpipe.config import data_format
from bagpipe.config.data_format import with_format
from bagpipe.config.load import parse_config
from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from data import cli
from data.formats import open_source
from tests.data.files import avazu_csv, avazu_rows, criteo_lines, save_to_disk, write_examples

TABLE = pa.table({"y": [1, 0], "user": [7, 8]})
SCHEMA = 'label = "y"\nsparse = ["user"]\n'


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def parquet(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(TABLE, path)


def arrays(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, array in (("dense", np.zeros((2, 1))), ("labels", np.zeros(2)), ("sparse", np.zeros((2, 1), int))):
        np.save(path.parent / f"day_0_{name}.npy", array)


def arrow(path):
    pyarrow.feather.write_feather(TABLE, path, compression="uncompressed")


RATINGS_CSV = b"userId,movieId,rating,timestamp\n1,2,4.5,9\n"

#: file, what is written there, the path that is given (""), the format.
FILES = [
    ("day_0", criteo_lines(2), "day_0", "criteo-tsv"),
    ("train.txt.gz", criteo_lines(2), "train.txt.gz", "criteo-tsv"),
    ("days/day_3.gz", criteo_lines(2), "days", "criteo-tsv"),
    ("train", avazu_csv(avazu_rows(2)), "train", "avazu-csv"),
    ("train.gz", avazu_csv(avazu_rows(2), end="\r\n"), "train.gz", "avazu-csv"),
    ("u.data", b"196\t242\t3\t881250949\n", "u.data", "movielens"),
    ("ratings.dat", b"1::1193::5::978300760\n", "ratings.dat", "movielens"),
    ("any.csv", b"\xef\xbb\xbf" + RATINGS_CSV, "any.csv", "movielens"),
    ("mark.tsv", b"\xef\xbb\xbf" + criteo_lines(2), "mark.tsv", "criteo-tsv"),
    ("mark/u.data", b"\xef\xbb\xbf196\t242\t3\t881250949\n", "mark", "movielens"),
    ("ml/ratings.csv.gz", RATINGS_CSV, "ml", "movielens"),
    ("a", parquet, "a", "parquet"),
    ("parts/part-0.parquet", parquet, "parts", "parquet"),
    ("a.arrow", arrow, "a.arrow", "parquet"),
    ("a.tfrecord", lambda path: write_examples(path, TABLE.to_pylist()), "a.tfrecord", "tfrecord"),
    ("hf", lambda path: save_to_disk(TABLE, path), "hf", "huggingface"),
    ("days/x", arrays, "days", "mlperf-npz"),
    ("x", arrays, "day_0_labels.npy", "mlperf-npz"),
    ("clicks.csv", b"y,user\n1,7\n", "clicks.csv", "csv"),
    ("clicks.gz", b"1;7\n", "clicks.gz", "csv"),
    # the first bytes tell compression and format, not the names
    ("plain.gz", lambda path: path.write_bytes(criteo_lines(2)), "plain.gz", "criteo-tsv"),
    ("packed.tsv", lambda path: path.write_bytes(gzip.compress(criteo_lines(2))), "packed.tsv", "criteo-tsv"),
    ("hive/dt=1/000000_0", parquet, "hive", "parquet"),
    ("one.pq/part-0.PQ", parquet, "one.pq", "parquet"),
]


@pytest.mark.parametrize(("file", "content", "given", "expected"), FILES, ids=lambda item: None)
def test_the_format_is_told_from_the_content(tmp_path, file, content, given, expected):
    if callable(content):
        content(tmp_path / file)
    else:
        write(tmp_path / file, content)
    schema = ""
    if expected in ("csv", "huggingface", "parquet", "tfrecord"):
        schema = str(tmp_path / "schema.toml")
        more = '[csv]\ndelimiter = ";"\ncolumns = ["y", "user"]' if given == "clicks.gz" else ""
        Path(schema).write_text(SCHEMA + more)
    data = DataConfig(path=str(tmp_path / given), schema=schema)
    assert with_format(data).format == expected
    source = open_source(data)  # and the reader of that format agrees
    assert source.layout.startswith(expected)
    assert sum(source.read(block).num_rows for segment in source.segments() for block in source.blocks(segment))
    flags = [f"--data.path={data.path}", f"--data.schema={schema}"]
    assert parse_config(flags, "test").config.data.format == expected


UNKNOWN = [
    (b"y,user\n1,7\n", "looks like separated text with a header, which needs data.format csv and data.schema"),
    (b"some words\n", "the format of a.file cannot be told from its content: expected data.format, one of avazu-csv, "),
    (b"\x00\x01", "the format of a.file cannot be told"),
    (b"", "the format of a.file cannot be told"),
    (bz2.compress(criteo_lines(2)), "a.file is compressed by bzip2, which no format reads: uncompress it"),
    (gzip.compress(criteo_lines(2), mtime=0)[:20], "the format of a.file cannot be told"),
    (criteo_lines(1).replace(b"\t", b",").lstrip(b"01") or b"?", "the format of a.file cannot be told"),
]


@pytest.mark.parametrize(("content", "message"), UNKNOWN)
@pytest.mark.parametrize("folder", [True, False])
def test_invented_data_never_takes_the_place_of_a_file(tmp_path, content, message, folder):
    write(tmp_path / "in" / "a.file", content)
    path = str(tmp_path / "in" if folder else tmp_path / "in" / "a.file")
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        open_source(DataConfig(path=path))
    assert str(caught.value).startswith(f"data.path {path}: ")
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=re.escape(message)):
        parse_config(["--data.path", path], "test")


def test_damaged_gzip_and_an_empty_folder(tmp_path):
    (tmp_path / "a.gz").write_bytes(b"no gzip")
    with pytest.raises(InputError, match=r"a\.gz cannot be told"):
        with_format(DataConfig(path=str(tmp_path / "a.gz")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="the folder holds no data file"):
        with_format(DataConfig(path=str(tmp_path / "empty")))


def test_a_path_that_is_not_here_is_left_to_the_cacher(tmp_path):
    """A trainer whose cacher runs elsewhere need not see the data."""
    config = parse_config(["--data.path", "/nowhere/x.tsv"], "test").config
    assert config.data.format == "synthetic"
    with pytest.raises(InputError, match=r"data.path /nowhere/x.tsv: no such file or folder"):
        open_source(config.data)


def test_a_named_format_is_kept(tmp_path):
    write(tmp_path / "a", criteo_lines(1))
    assert with_format(DataConfig(path=str(tmp_path / "a"), format="csv")).format == "csv"


def test_the_tools_tell_the_format_too(tmp_path, capsys):
    write(tmp_path / "a.txt", criteo_lines(50))
    assert cli.main(["convert", str(tmp_path / "a.txt"), str(tmp_path / "a.arrow")]) == 0
    assert cli.main(["replay", "--data.path", str(tmp_path / "a.txt"), "--data.batch_size", "10"]) == 0
    assert "a.txt: 50 examples" in capsys.readouterr().out
    write(tmp_path / "b.txt", b"some words\n")
    for command in (
        ["convert", str(tmp_path / "b.txt"), "b.arrow"],
        ["replay", "--data.path", str(tmp_path / "b.txt")],
    ):
        assert cli.main(command) == 2
        assert "b.txt cannot be told from its content" in capsys.readouterr().err
    assert cli.main(["convert", "", "b.arrow"]) == 2


def test_programs_name_a_format_that_they_tell(tmp_path, capsys, monkeypatch):
    """In one line, once in a process; of several ranks the first one."""
    path = str(tmp_path / "a.txt")
    write(tmp_path / "a.txt", criteo_lines(9))
    said = f"note: data.format is criteo-tsv, told from the content of {path}\n"
    flags = ["--data.path", path, "--data.batch_size", "2,3", "--policy", "lru"]
    monkeypatch.setenv("RANK", "1")
    parse_config([f"--data.path={path}"], "test")
    assert capsys.readouterr().err == ""
    for command in (["replay", *flags], ["convert", path, str(tmp_path / "a.arrow")]):
        data_format._named.clear()
        monkeypatch.setenv("RANK", "0")
        assert cli.main(command) == 0
        assert capsys.readouterr().err.count(said) == 1
    data_format._named.clear()
    parse_config([f"--data.path={path}", "--data.format=criteo-tsv"], "test")
    with_format(DataConfig(path=path))
    assert capsys.readouterr().err == "", "it is given, or no program asks"
