"""Tables of a source against those of a new job, and the rows that pass between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.manifest import FileEntry, Manifest, Part
from bagpipe.errors import InputError
from bagpipe.kernels.initialization import TORCH_DTYPE
from bagpipe.kernels.row_format import split_record
from bagpipe.start_from.source import Extent, RowChunk
from bagpipe.start_from.tables import match_tables, write_rows
from bagpipe.types.schema import RowSchema, RowTable


@dataclass
class Rows:
    """A table in memory: row i has weights ``(i + 0.5) / 7`` and state i, in two chunks."""

    dim: int = 3
    dtype: str = "float32"
    optimizer: str = "adagrad"
    hashed_rows: int | None = None
    ids: tuple[int, ...] = (-5, 2, 9)
    scale: float = 1.0

    def extent(self) -> Extent:
        return Extent(num_rows=len(self.ids), least=min(self.ids), largest=max(self.ids))

    def chunks(self) -> Iterator[RowChunk]:
        for part in (self.ids[:2], self.ids[2:]):
            ids = np.array(part, np.int64)
            values = torch.from_numpy(ids).to(torch.float64)[:, None].expand(-1, self.dim)
            weights = ((values + 0.5) / 7 * self.scale).to(TORCH_DTYPE[self.dtype])
            yield RowChunk(ids=ids, weights=weights, state=values.float() if self.optimizer else None)


def schema(*tables: RowTable, optimizer: str = "adagrad", dtype: str = "float32") -> RowSchema:
    return RowSchema(tables=tables, optimizer=optimizer, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("theirs", ["adagrad", "adam"])
def test_rows_pass_with_the_state_of_the_same_optimizer(tmp_path: Path, dtype: str, theirs: str) -> None:
    source = Rows(optimizer=theirs)
    ours = schema(RowTable(name="new", dim=4), RowTable(name="user", dim=3), dtype=dtype)
    plans, items = match_tables({"old": Rows(), "user": source}, ours, {}, ())
    state = "adagrad: taken" if theirs == "adagrad" else "adam: dropped, adagrad: new"
    assert [(item.name, item.fate.value, item.state) for item in items] == [
        ("new", "new", "adagrad: new"), ("user", "taken", state), ("old", "dropped", ""),
    ]  # fmt: skip
    files = write_rows(tmp_path, ours, plans)
    dense = FileEntry(name="dense-0000.safetensors", num_bytes=0, xxh3_128="0" * 32)
    manifest = Manifest(
        lineage="0" * 32, generation=1, step=0, parent_checkpoint_id="", token="1", epoch=0, world_size=1, settings={},
        row_schema=ours.to_json(), identity={}, parts=(Part(rank=0, dense=dense),), base=files,
    )  # fmt: skip
    rows = CheckpointRows(tmp_path, manifest, ours)
    assert rows.extent(1) == (3, -5, 9)
    assert rows.extent(0) == (0, 0, -1)
    (request,) = rows.rows(1)
    records = torch.from_numpy(request.rows).view(TORCH_DTYPE[dtype])
    weights, state_values = split_record(records, ours, 3, "adagrad")
    (expected,) = [torch.cat([chunk.weights for chunk in source.chunks()])]
    assert torch.equal(weights, expected.to(TORCH_DTYPE[dtype]))
    kept = torch.tensor([-5.0, 2.0, 9.0])[:, None].expand(-1, 3) if theirs == "adagrad" else torch.zeros(3, 3)
    assert torch.equal(state_values, kept.to(state_values.dtype))


@pytest.mark.parametrize(
    ("source", "table", "hashed", "problem"),
    [
        (Rows(dim=2), RowTable(name="t", dim=3), {}, "rows of 2 weights there, of 3 here"),
        (Rows(), RowTable(name="t", dim=3, rows=50), {}, "it has row -5 there, ids are in [0, 50) here"),
        (Rows(ids=(0, 50)), RowTable(name="t", dim=3, rows=50), {}, "it has row 50 there, ids are in [0, 50) here"),
        (
            Rows(hashed_rows=10, ids=(1, 2)), RowTable(name="t", dim=3, rows=20), {"t": 20},
            "ids are hashed into 10 rows there, hashed into 20 rows here",
        ),
        (
            Rows(ids=(1, 2)), RowTable(name="t", dim=3, rows=20), {"t": 20},
            "ids are not hashed there, hashed into 20 rows here",
        ),
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit_says_why(
    source: Rows, table: RowTable, hashed: dict[str, int], problem: str
) -> None:
    plans, (item,) = match_tables({"t": source}, schema(table), hashed, ())
    assert (plans, item.fate.value, item.detail) == ([], "does not fit", problem)
    (taking,) = match_tables({"t": source}, schema(table), hashed, ("rows.t",))[1]
    assert (taking.fate.value, taking.state) == ("new", "adagrad: new")


def test_a_weight_beyond_its_new_dtype_is_refused(tmp_path: Path) -> None:
    ours = schema(RowTable(name="t", dim=3), dtype="float16")
    plans, (item,) = match_tables({"t": Rows(scale=1e6)}, ours, {}, ("state.*",))
    assert (item.detail, item.state) == ("3 rows of 3 float32, as float16", "adagrad: dropped, adagrad: new")
    with pytest.raises(InputError, match=r"table 't': row -5 has a weight beyond the largest of torch\.float16"):
        write_rows(tmp_path, ours, plans)
