"""`with_format`: the format of a `data.path` that is given without `data.format`, told from names and first bytes.

`told_formats` also names it on stderr, for programs.

    folder ──names of its files──> format, or its first file
    file   ──first bytes, or the first line of text──> format, or one InputError that asks for data.format

Text is of the format `csv` if the schema file names a label, because the columns of the other text formats are fixed.
Imports neither torch nor numpy.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

from bagpipe.config.sections import DataConfig, DataFormat
from bagpipe.errors import InputError
from bagpipe.files.access import is_file, is_folder, join, open_file
from bagpipe.files.compression import START_BYTES, compression_of, open_inflated
from bagpipe.files.data_folder import data_folder
from bagpipe.util.documents import file_text, toml_tables
from bagpipe.util.program import note

__all__ = ["told_formats", "with_format"]

#: Formats that this process has named, by path.
_named: dict[str, str] = {}

#: Bytes of a first line that are looked at. A line of Criteo has about 300.
_LINE_BYTES = 1 << 16
_BUFFER_BYTES = 1 << 12

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


def told_formats(inputs: Sequence[DataConfig]) -> list[DataConfig]:
    """`with_format` of each, and a note that names each format not given: once in a process, and of rank 0 alone.

    Raises:
        InputError: as `with_format`.
    """
    found = [with_format(data) for data in inputs]
    told: dict[str, list[str]] = {}
    for data, known in zip(inputs, found, strict=True):
        if known.format != data.format and _named.get(data.path) != known.format:
            told.setdefault(known.format, []).append(data.path)
        _named[data.path] = known.format
    if os.environ.get("RANK", "0") == "0":
        for name, paths in told.items():
            others = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            note(f"data.format is {name}, told from the content of {paths[0]}{others}")
    return found


def _format_of(path: str, schema: str) -> DataFormat:
    own = path.rpartition("/")[2]
    try:
        if is_folder(path):
            files = data_folder(path).files
            for has, found in _FOLDERS:
                if has(set(files)):
                    return found
            if not files:
                raise InputError(f"data.path {path}: the folder holds no data file")
            first = join(path, files[0])
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
    return any(name.lower().endswith((".parquet", ".pq", ".arrow", ".feather")) for name in names)


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
        start = stream.read(START_BYTES)
    for magic, found in _FIRST_BYTES.items():
        if start.startswith(magic):
            return found
    kind = compression_of(start)
    if kind not in ("", "gzip"):
        raise InputError(f"data.path {path}: {name} is compressed by {kind}, which no format reads: uncompress it")
    line = _first_line(file, kind)
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


def _first_line(file: str, kind: str) -> bytes:
    """The first line of a text of a kind of `compression_of`, without its end, or its beginning."""
    with open_file(file) as content:
        try:
            stream = open_inflated(content, kind, _BUFFER_BYTES) if kind == "gzip" else content
            line = stream.readline(_LINE_BYTES)
        except InputError:
            return b"\0"
    return line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n")


def _names_label(schema: str) -> bool:
    """Whether a schema file names the label column."""
    if not schema:
        return False
    try:
        return "label" in toml_tables(file_text(schema, subject="schema"), source=schema)
    except InputError:  # the reader explains it
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
