"""`with_format`: the format of a `data.path` that is given without `data.format`, told from names and first bytes.

    folder ──names of its files──> format, or its first file
    file   ──first bytes, or the first line of text──> format, or one InputError that asks for data.format

Text is of the format `csv` if the schema file names a label, because the columns of the other text formats are fixed.
Imports neither torch nor numpy.
"""

from __future__ import annotations

import dataclasses
import gzip
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

from bagpipe.config.sections import DataConfig, DataFormat
from bagpipe.errors import InputError
from bagpipe.files.access import is_file, is_folder, join, list_folder, open_file
from bagpipe.util.documents import parse_toml

__all__ = ["with_format"]

#: Bytes of a first line that are looked at. A line of Criteo has about 300.
_LINE_BYTES = 1 << 16

#: Names of rating files of MovieLens, each also with .gz.
_RATINGS = ("ratings.csv", "ratings.dat", "u.data")

_FIRST_BYTES: Mapping[bytes, DataFormat] = {
    b"PAR1": "parquet",
    b"ARROW1": "parquet",
    b"\xff\xff\xff\xff": "parquet",
}

#: Ends of the names of MLPerf's arrays.
_MLPERF = ("_dense.npy", "_labels.npy", "_sparse.npy", "_sparse_multi_hot.npz")

_AVAZU = frozenset({"click", "hour", "banner_pos", "site_id", "app_id", "device_ip", "C14", "C21"})
_MOVIELENS = frozenset({"userId", "movieId", "rating"})
_INTEGER = re.compile(rb"-?[0-9]*")
_HEX = re.compile(rb"[0-9a-fA-F]{0,16}")


def with_format(data: DataConfig) -> DataConfig:
    """`data` with the format of its path, if it has a path and no format but the default one.

    Raises:
        InputError: the format cannot be told from the path's content.
    """
    if data.format != "synthetic" or not data.path or data.is_topic:
        return data
    if not (is_folder(data.path) or is_file(data.path)):
        return data
    return dataclasses.replace(data, format=_format_of(data.path, data.schema))


def _format_of(path: str, schema: str) -> DataFormat:
    own = path.rpartition("/")[2]
    try:
        if is_folder(path):
            names = {name for name in list_folder(path) if not name.startswith((".", "_"))}
            for has, found in _FOLDERS:
                if has(names):
                    return found
            if not names:
                raise InputError(f"data.path {path}: the folder holds no data file")
            first = join(path, min(names))
        elif own.endswith(_MLPERF):
            return "mlperf-npz"
        elif _has_records({own}):
            return "tfrecord"
        else:
            first = path
        return _format_of_file(path, first, schema)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None


def _is_dataset(names: set[str]) -> bool:
    return bool(names & {"state.json", "dataset_dict.json"})


def _has_ratings(names: set[str]) -> bool:
    return any(name + ending in names for name in _RATINGS for ending in ("", ".gz"))


def _has_columnar(names: set[str]) -> bool:
    return any(name.endswith((".parquet", ".arrow", ".feather")) for name in names)


def _has_arrays(names: set[str]) -> bool:
    return any(name.endswith(_MLPERF) for name in names)


def _has_records(names: set[str]) -> bool:
    return any(".tfrecord" in name for name in names)


#: Tests of the names in a folder, in this order.
_FOLDERS: Sequence[tuple[Callable[[set[str]], bool], DataFormat]] = (
    (_is_dataset, "huggingface"),
    (_has_ratings, "movielens"),
    (_has_columnar, "parquet"),
    (_has_arrays, "mlperf-npz"),
    (_has_records, "tfrecord"),
)


def _format_of_file(path: str, file: str, schema: str) -> DataFormat:
    """The format by the content of a file of `path`."""
    name = file.rpartition("/")[2]
    with open_file(file) as stream:
        start = stream.read(8)
    for magic, found in _FIRST_BYTES.items():
        if start.startswith(magic):
            return found
    line = _first_line(file)
    if b"\0" not in line:
        if _names_label(schema):
            return "csv"
        for fits, found in _LINES:
            if fits(line):
                return found
        if _is_header(line):
            raise InputError(
                f"data.path {path}: {name} looks like separated text with a header, which needs data.format csv "
                f"and data.schema, a TOML file that names label, dense and sparse columns"
            )
    raise InputError(
        f"data.path {path}: the format of {name} cannot be told from its content: expected data.format, one of "
        f"{', '.join(name for name in get_args(DataFormat) if name != 'synthetic')}"
    )


def _first_line(file: str) -> bytes:
    """The first line of a text, without its end, or its beginning."""
    try:
        with open_file(file) as content, gzip.open(content) if file.endswith(".gz") else nullcontext(content) as stream:
            line: bytes = stream.readline(_LINE_BYTES)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return b"\0"
    return line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n")


def _names_label(schema: str) -> bool:
    """Whether a schema file names the label column."""
    if not schema:
        return False
    try:
        return "label" in parse_toml(Path(schema).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError):  # the reader explains it
        return False


def _is_criteo(line: bytes) -> bool:
    columns = line.split(b"\t")
    numbers, ids = columns[1:14], columns[14:]
    return (
        len(columns) == 40
        and columns[0] in (b"0", b"1")
        and all(_INTEGER.fullmatch(text) for text in numbers)
        and all(_HEX.fullmatch(text) for text in ids)
    )


def _is_avazu(line: bytes) -> bool:
    return _names(line) >= _AVAZU


def _is_movielens(line: bytes) -> bool:
    if _names(line) >= _MOVIELENS:
        return True
    return any(
        len(columns) == 4 and all(re.fullmatch(rb"[0-9]+(\.[0-9]+)?", text) for text in columns)
        for columns in (line.split(b"\t"), line.split(b"::"))
    )


def _names(line: bytes) -> set[str]:
    return {name.strip().strip('"') for name in line.decode("latin-1").split(",")}


def _is_header(line: bytes) -> bool:
    """Names with commas, semicolons or tabs between."""
    return any(
        line.count(separator) and all(re.match(rb'\s*"?[A-Za-z_]', text) for text in line.split(separator))
        for separator in (b",", b";", b"\t", b"|")
    )


#: Tests of the first line, in this order.
_LINES: Sequence[tuple[Callable[[bytes], bool], DataFormat]] = (
    (_is_criteo, "criteo-tsv"),
    (_is_avazu, "avazu-csv"),
    (_is_movielens, "movielens"),
)
