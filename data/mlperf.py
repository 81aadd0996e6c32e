"""Criteo's logs as NumPy arrays, mapped into memory if local, as MLPerf's DLRM-DCNv2 and torchrec preprocess them.

    day_N_dense.npy                 float [n, 13]     dense values, used as they are
    day_N_labels.npy                number [n, 1] or [n]
    day_N_sparse_multi_hot.npz      arrays "0", "1", … of integers [n, ids per row], one per feature, uncompressed
    or day_N_sparse.npy             integers [n, 26], one id per row and feature

    rows [start, stop) of each array ──copy──> Columns

The names of the columns are Criteo's: I1, I2, … and C1, C2, …, with a table for each feature. Rows are numbered from 0
within their day.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.files.access import is_file, is_folder, join
from bagpipe.files.data_folder import natural_key, path_key, tell_left_out
from bagpipe.types.schema import DataSchema, Feature, Table
from bagpipe.util.distinct_ids import distinct_ids
from data.columns import Columns, take_rows
from data.hashing import place_ids, range_reason
from data.narrowed import narrowed_schema
from data.npy_files import Array, map_array, member_names
from data.source import Block, Segment
from data.text_files import whole_folder

__all__ = ["Day", "MlperfSource", "find_days", "mlperf_schema"]

#: Rows in a block: with 214 ids a row, as in MLPerf, about 115 MB of ids.
BLOCK_ROWS = 65_536

_DENSE, _LABELS, _MULTI_HOT, _SPARSE = "_dense.npy", "_labels.npy", "_sparse_multi_hot.npz", "_sparse.npy"
_ENDINGS = (_DENSE, _LABELS, _MULTI_HOT, _SPARSE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """The files of one day. `sparse` ends with .npz (several ids a feature) or .npy (one)."""

    dense: str
    labels: str
    sparse: str


def find_days(path: str) -> tuple[Day, ...]:
    """The days of a folder in natural order, or the one day that a file belongs to.

    Raises:
        InputError: no such file or folder, or a file of a day is missing.
    """
    if not path:
        raise InputError("data.path is empty: name a folder, or a file such as day_0_dense.npy")
    if is_folder(path):
        return _days_of(path)
    if not is_file(path):
        raise InputError(f"data.path {path}: no such file or folder")
    for ending in _ENDINGS:
        if path.endswith(ending):
            return (_day(path.removesuffix(ending)),)
    raise InputError(f"{path}: expected a name ending in {_DENSE}, {_LABELS}, {_MULTI_HOT} or {_SPARSE}")


def _days_of(path: str) -> tuple[Day, ...]:
    found = whole_folder(path)
    stems = {name.removesuffix(end) for name in found.files for end in _ENDINGS if name.endswith(end)}
    if not stems:
        raise InputError(f"{path}: the folder holds no file ending in {_DENSE}")
    days = tuple(_day(join(path, stem)) for stem in sorted(stems, key=path_key))
    used = {name for day in days for name in (day.dense, day.labels, day.sparse)}
    unused = [name for name in found.files if join(path, name) not in used]
    tell_left_out(path, [*unused, *found.left_out], "only the three files of each day are read")
    return days


def _day(stem: str) -> Day:
    sparse = next((stem + ending for ending in (_MULTI_HOT, _SPARSE) if is_file(stem + ending)), None)
    for name in (stem + _DENSE, stem + _LABELS):
        if not is_file(name):
            raise InputError(f"{name}: no such file, which belongs to the other files of {stem.rpartition('/')[2]}")
    if sparse is None:
        raise InputError(f"{stem}{_MULTI_HOT}: no such file, nor one ending in {_SPARSE}")
    return Day(dense=stem + _DENSE, labels=stem + _LABELS, sparse=sparse)


def mlperf_schema(num_dense: int, num_sparse: int) -> DataSchema:
    """Columns I1, I2, … and C1, C2, …, each of the latter with a table of raw ids."""
    names = [f"C{number}" for number in range(1, num_sparse + 1)]
    return DataSchema(
        label="label",
        dense=tuple(f"I{number}" for number in range(1, num_dense + 1)),
        features=tuple(Feature(name=name, table=name) for name in names),
        tables=tuple(Table(name=name) for name in names),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Arrays:
    """The arrays of a day: dense ``[n, num_dense]``, labels ``[n]`` or ``[n, 1]``, and ids.

    Attributes:
        sparse: ``[n, k]`` of each feature; or one array ``[n, features]``, with an id of each.
        widths: ids of each feature in a row.
    """

    dense: Array
    labels: Array
    sparse: tuple[Array, ...]
    widths: tuple[int, ...]

    def ids(self, rows: slice, features: Sequence[int]) -> Iterator[NDArray[Any]]:
        """Ids ``[rows, k]`` of some features."""
        if len(self.sparse) == len(self.widths):
            yield from (self.sparse[feature][rows] for feature in features)
        elif features:
            (array,) = self.sparse
            some = array[rows]
            yield from (some[:, feature : feature + 1] for feature in features)


def _open(day: Day) -> _Arrays:
    dense, labels = map_array(day.dense), map_array(day.labels)
    if day.sparse.endswith(_MULTI_HOT):
        names = sorted(member_names(day.sparse), key=natural_key)
        sparse = tuple(map_array(day.sparse, name) for name in names)
    else:
        sparse = (map_array(day.sparse),)
    for path, array, kinds, ndims in (
        (day.dense, dense, "f", (2,)),
        (day.labels, labels, "iufb", (1, 2)),
        *((day.sparse, ids, "iu", (2,)) for ids in sparse),
    ):
        words = {"f": "floating-point numbers", "iufb": "numbers", "iu": "integers"}[kinds]
        if array.dtype.kind not in kinds or array.ndim not in ndims:
            raise InputError(
                f"{path}: expected {words} of shape {'[n] or [n, 1]' if ndims == (1, 2) else '[n, columns]'}, "
                f"got {array.dtype} of shape {list(array.shape)}"
            )
        if array.shape[0] != dense.shape[0]:
            raise InputError(f"{path}: expected {dense.shape[0]} rows as in {day.dense}, got {array.shape[0]}")
    if labels.ndim == 2 and labels.shape[1] != 1:
        raise InputError(f"{day.labels}: expected one label a row, got shape {list(labels.shape)}")
    if day.sparse.endswith(_MULTI_HOT):
        widths = tuple(array.shape[1] for array in sparse)
    else:
        widths = (1,) * sparse[0].shape[1]
    return _Arrays(dense=dense, labels=labels, sparse=sparse, widths=widths)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlperfSource:
    """Days of NumPy arrays.

    Attributes:
        days: in reading order.
        schema: columns; tables can be hashed or bounded.
        multi_hot: features with several ids in a row.
        bad_rows: stop or skip.
        block_rows: most rows in a block.
        columns: features that are read, as numbers of the files' arrays; None: all of them.
        whole: with `columns`: dense and sparse columns of the files.
    """

    days: tuple[Day, ...]
    schema: DataSchema
    multi_hot: frozenset[str]
    bad_rows: str = "stop"
    block_rows: int = BLOCK_ROWS
    columns: tuple[int, ...] | None = None
    whole: tuple[int, int] = (0, 0)

    @classmethod
    def at(cls, path: str, **options: Any) -> MlperfSource:
        """The source of a folder, or of the day of a file.

        Raises:
            InputError: a file is missing, or its array has another shape or type than expected.
        """
        days = find_days(path)
        arrays = _open(days[0])
        schema = mlperf_schema(arrays.dense.shape[1], len(arrays.widths))
        multi_hot = frozenset(
            feature.name
            for day in days
            for feature, width in zip(schema.features, _open(day).widths, strict=False)  # `segments` compares them
            if width != 1
        )
        return cls(**{"days": days, "schema": schema, "multi_hot": multi_hot, **options})

    def narrowed(self, features: tuple[int, ...], *, dense: bool) -> MlperfSource:
        """See `data.narrowed`."""
        schema = narrowed_schema(self.schema, features, dense=dense)
        names = {feature.name for feature in schema.features}
        return dataclasses.replace(
            self, schema=schema, multi_hot=self.multi_hot & names, columns=features, whole=self._shape
        )

    @property
    def _shape(self) -> tuple[int, int]:
        """Dense and sparse columns of the files."""
        return (len(self.schema.dense), len(self.schema.features)) if self.columns is None else self.whole

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(path for day in self.days for path in (day.dense, day.labels, day.sparse))

    @property
    def in_processes(self) -> bool:
        return False  # numpy copies outside the interpreter lock

    @property
    def layout(self) -> str:
        return f"mlperf-npz/{self.block_rows}"

    def segments(self) -> tuple[Segment, ...]:
        found = []
        for day in self.days:
            arrays = _open(day)
            shape = (arrays.dense.shape[1], len(arrays.widths))
            expected = self._shape
            if shape != expected:
                raise InputError(
                    f"{day.dense}: expected {expected[0]} dense and {expected[1]} sparse columns as on the first day, "
                    f"got {shape[0]} and {shape[1]}"
                )
            rows = arrays.dense.shape[0]
            for start in range(0, rows, self.block_rows):
                stop = min(start + self.block_rows, rows)
                found.append(Segment(file=day.dense, start=start, stop=stop, num_rows=stop - start))
        if not found:
            raise InputError(f"{self.days[0].dense}: the file holds no rows")
        return tuple(found)

    def blocks(self, segment: Segment) -> Iterator[Block]:
        yield Block(file=segment.file, start=segment.start, stop=segment.stop, num_rows=segment.num_rows)

    def count_rows(self, segment: Segment, at_most: int | None = None) -> int:
        return segment.num_rows or 0

    def locate(self, block: Block, row: int) -> str:
        return f"{block.file}: row {block.start + row} (from 0)"

    def read(self, block: Block) -> Columns:
        arrays = _open(next(day for day in self.days if day.dense == block.file))
        rows = block.stop - block.start
        if arrays.dense.shape[0] < block.stop:
            raise InputError(
                f"{block.file}: expected at least {block.stop} rows, got {arrays.dense.shape[0]}: "
                f"the file changed while it was read"
            )
        part = slice(block.start, block.stop)
        with np.errstate(over="ignore"):  # a number beyond float32 is infinite, which is refused
            dense = np.ascontiguousarray(arrays.dense[part][:, : len(self.schema.dense)], np.float32)
            labels = arrays.labels[part].reshape(-1).astype(np.float32)
        problems = []
        finite = np.isfinite(dense)
        if not finite.all():
            bad = np.flatnonzero(~finite.all(axis=1))
            problems.append((bad, "expected finite dense values, got nan or infinity"))
        lengths = np.empty((len(self.schema.features), rows), np.int32)
        values = [np.empty(0, np.int64)]
        columns = range(len(arrays.widths)) if self.columns is None else self.columns
        for number, (feature, some) in enumerate(zip(self.schema.features, arrays.ids(part, columns), strict=True)):
            lengths[number] = some.shape[1]
            table = self.schema.table(feature.table)
            ids, outside = place_ids(some.astype(np.int64).reshape(-1), table)
            if outside.size:
                reason = range_reason(table, int(ids[outside[0]]))
                problems.append((distinct_ids([outside // some.shape[1]]), reason))
            values.append(ids)
        bad = distinct_ids([some for some, _ in problems]) if problems else np.zeros(0, np.int64)
        if bad.size and self.bad_rows == "stop":
            reason = next(reason for some, reason in problems if some[0] == bad[0])
            raise InputError(f"{self.locate(block, int(bad[0]))}: {reason}")
        found = Columns(
            labels=labels,
            dense=dense,
            values=np.concatenate(values),
            lengths=lengths,
            weights=None,
            num_raw_rows=rows,
            bad_rows=bad,
        )
        return take_rows(found, np.setdiff1d(np.arange(rows), bad)) if bad.size else found
