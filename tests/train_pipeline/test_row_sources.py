"""Sources of rows: what they write, and what does not fit is refused when they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bagpipe.checkpoint.export import row_states
from bagpipe.errors import InputError
from bagpipe.kernels.initialization import TORCH_DTYPE
from bagpipe.kernels.row_format import split_record
from bagpipe.store.interface import WriteRequest
from bagpipe.train_pipeline.row_sources import RowChunks, TensorRows, rows_of_file
from bagpipe.types.schema import OPTIMIZER_STATE_WIDTH, RowSchema, RowTable, base_optimizer

TABLES = (
    RowTable(name="a", dim=3, rows=9),
    RowTable(name="b", dim=2),
    RowTable(name="c", dim=4, rows=5, optimizer="rowwise_adagrad"),
    RowTable(name="d", dim=2, rows=5, optimizer="sgd"),
)


def _schema(dtype: str = "float32") -> RowSchema:
    return RowSchema(tables=TABLES, optimizer="adam", dtype=dtype)


def _parts(request: WriteRequest, schema: RowSchema) -> tuple[torch.Tensor, torch.Tensor]:
    records = torch.from_numpy(request.rows).view(TORCH_DTYPE[schema.dtype])
    table = schema.tables[request.table]
    return split_record(records, schema, table.dim, schema.optimizer_of(request.table))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_records_have_weights_and_state(dtype: str) -> None:
    schema, weights = _schema(dtype), torch.randn(3, 3, dtype=torch.float64)
    state = {"exp_avg": torch.ones(3, 3), "exp_avg_sq": torch.full((3, 3), 2.0)}
    (request,) = TensorRows(schema, "a", torch.tensor([4, 8, 0], dtype=torch.int32), weights, state).requests()
    own, states = _parts(request, schema)
    assert request.ids.tolist() == [4, 8, 0]
    assert torch.equal(own, weights.to(TORCH_DTYPE[dtype]))
    assert states.tolist() == [[1.0] * 3 + [2.0] * 3] * 3
    (request,) = TensorRows(schema, "c", None, torch.ones(5, 4), {"sum": torch.arange(5)}).requests()
    assert request.ids.tolist() == [0, 1, 2, 3, 4]
    assert _parts(request, schema)[1].tolist() == [[0], [1], [2], [3], [4]]
    (request,) = TensorRows(schema, "c", [2], torch.ones(1, 4)).requests()  # type: ignore[arg-type]
    assert _parts(request, schema)[1].tolist() == [[0]]


@pytest.mark.parametrize("optimizer", OPTIMIZER_STATE_WIDTH)
@pytest.mark.parametrize("source", ["tensors", "file"])
def test_rows_of_every_optimizer_begin_at_step_0(optimizer: str, source: str, tmp_path: Path) -> None:
    """The step of a row that decays is no state that anybody gives."""
    schema = RowSchema(tables=(RowTable(name="a", dim=3, rows=9, optimizer=optimizer),), optimizer="sgd")
    weights, shapes = torch.randn(9, 3), [(9,) if is_scalar else (9, 3) for _, is_scalar in row_states(optimizer)]
    names = [name for name, _ in row_states(optimizer)]
    state = {name: torch.full(shape, 2.0 + k) for k, (name, shape) in enumerate(zip(names, shapes, strict=True))}
    made: list[RowChunks] = [TensorRows(schema, "a", None, weights), TensorRows(schema, "a", None, weights, state)]
    if source == "file":
        paths = tmp_path / "model.safetensors", tmp_path / "optimizer.safetensors"
        save_file({"embeddings.a.weight": weights}, paths[0])
        save_file({f"embeddings.a.weight.{name}": value for name, value in state.items()}, paths[1])
        made = [rows_of_file(schema, paths[0])["a"], rows_of_file(schema, paths[0], state=paths[1])["a"]]
    given = torch.cat([value.reshape(9, -1) for value in state.values()], 1) if state else torch.empty(9, 0)
    for rows, expected in zip(made, (torch.zeros_like(given), given), strict=True):
        (request,) = rows.requests()
        own, states = _parts(request, schema)
        assert torch.equal(own, weights)
        assert torch.equal(states[:, : given.shape[1]], expected)
        assert states.shape[1] - given.shape[1] == base_optimizer(optimizer)[1]
        assert not states[:, given.shape[1] :].any()


def test_rows_come_in_chunks() -> None:
    ids = torch.randperm(1_000_000) - 7
    requests = list(TensorRows(_schema(), "b", ids, torch.stack([ids, -ids], 1)).requests())
    assert len(requests) > 1
    assert np.array_equal(np.concatenate([request.ids for request in requests]), ids.numpy())
    assert all((_parts(r, _schema())[0][:, 1] == -torch.from_numpy(r.ids)).all() for r in requests)
    assert list(TensorRows(_schema(), "b", torch.empty(0, dtype=torch.int64), torch.empty(0, 2)).requests()) == []


@pytest.mark.parametrize(
    ("table", "ids", "weights", "state", "text"),
    [
        ("x", None, torch.ones(1, 3), None, r"expected one of the tables \['a', 'b', 'c', 'd'\], got 'x'"),
        ("a", [1], torch.ones(1, 4), None, r"table 'a': expected weights \[1, 3\], got \[1, 4\]"),
        ("a", [1, 2], torch.ones(1, 3), None, r"expected weights \[2, 3\], got \[1, 3\]"),
        ("a", None, torch.ones(3), None, r"expected weights \[3, 3\], got \[3\]"),
        ("a", [9], torch.ones(1, 3), None, r"expected ids in \[0, 9\), got 9 to 9"),
        ("a", None, torch.ones(10, 3), None, r"expected ids in \[0, 9\), got 0 to 9"),
        ("a", [3, 1, 3], torch.ones(3, 3), None, "ids must be distinct, got 3 more than once"),
        ("a", [0.5], torch.ones(1, 3), None, "ids of table 'a' must be integers, got torch.float32"),
        ("d", [1], torch.ones(1, 2), {"sum": torch.ones(1, 2)}, r"the state of sgd, nothing, got sum \[1, 2\]"),
        ("c", [1], torch.ones(1, 4), {"sum": torch.ones(1, 4)}, r"of rowwise_adagrad, sum \[1\], got sum \[1, 4\]"),
    ],
)
def test_what_does_not_fit_is_refused(table: str, ids: Any, weights: torch.Tensor, state: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        TensorRows(_schema(), table, None if ids is None else torch.tensor(ids), weights, state)


def test_files(tmp_path: Path) -> None:
    path, state = tmp_path / "model.safetensors", tmp_path / "optimizer.safetensors"
    weights, ids = torch.randn(9, 3), torch.tensor([-5, 2**40])
    save_file(
        {
            "sparse.embedding_bags.a.weight": weights,
            "embeddings.b.weight": torch.ones(2, 2),
            "embeddings.b.ids": ids,
            "embeddings.other.weight": torch.ones(1, 1),
            "over.weight": torch.ones(1, 1),
        },
        path,
    )
    found = rows_of_file(_schema(), path)
    assert list(found) == ["a", "b"]
    (request,) = found["b"].requests()
    assert request.ids.tolist() == ids.tolist()
    (request,) = found["a"].requests()
    assert torch.equal(_parts(request, _schema())[0], weights)
    assert not _parts(request, _schema())[1].any()
    save_file({f"sparse.embedding_bags.a.weight.{name}": weights.clone() for name in ("exp_avg", "exp_avg_sq")}, state)
    (request,) = rows_of_file(_schema(), path, ["a"], state)["a"].requests()
    assert torch.equal(_parts(request, _schema())[1], torch.cat([weights, weights], 1))
    with pytest.raises(InputError, match=r"the state of adam, exp_avg \[2, 2\], exp_avg_sq \[2, 2\], got nothing"):
        rows_of_file(_schema(), path, ["b"], state)
    with pytest.raises(InputError, match=r"expected weights of table 'c'.*it has tables \['a', 'b', 'other'\]"):
        rows_of_file(_schema(), path, ["c"])
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        rows_of_file(_schema(), tmp_path / "none.safetensors")
    path.write_bytes(b"nothing")
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        rows_of_file(_schema(), path)
