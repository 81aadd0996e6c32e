from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from bagpipe.checkpoint.export import ExportTable, collect, write_dcp
from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.checkpoint.journal import RowWriter
from bagpipe.checkpoint.manifest import Part
from bagpipe.errors import InputError
from bagpipe.kernels.initialization import TORCH_DTYPE, initial_weights
from bagpipe.kernels.row_format import host_words, split_record
from bagpipe.store.interface import WriteRequest
from bagpipe.types.schema import RowSchema
from tests.checkpoint.samples import (
    SCHEMA,
    captured,
    manifest_of,
    model_and_optimizer,
    rows_of,
    save,
    three_checkpoints,
)

TABLES = (
    ExportTable(name="ebc.embedding_bags.user", table="user", num_rows=None),
    ExportTable(name="ebc.embedding_bags.item", table="item", num_rows=500),
    ExportTable(name="ebc.embedding_bags.shop", table="shop", num_rows=50),
)
DENSE = tuple(model_and_optimizer()[0].state_dict())


@pytest.fixture
def saved(tmp_path) -> Checkpoint:
    """Tables 1 and 2 are bounded, so the sample's negative ids become positive."""
    folder, _, _ = three_checkpoints(tmp_path / "dir")
    return folder.newest(pytest.fail)


def unbounded(table: ExportTable) -> ExportTable:
    return dataclasses.replace(table, num_rows=None)


def test_rows_of_a_table_without_bound_come_with_their_ids(saved):
    exported = collect(saved, [unbounded(table) for table in TABLES], DENSE, max_bytes=1 << 30)
    rows = rows_of(saved)
    for number, table in enumerate(TABLES):
        ids = rows.ids(number)
        expected = rows.read(number, ids).rows
        assert exported.weights[f"{table.name}.ids"].tolist() == ids.tolist()
        dim = SCHEMA.tables[number].dim
        assert (exported.weights[f"{table.name}.weight"].numpy() == expected[:, :dim]).all()
        assert (exported.states[f"{table.name}.weight.sum"].numpy() == expected[:, dim]).all()


@pytest.mark.parametrize(
    ("optimizer", "own"),
    [("sgd", None), ("adagrad", None), ("rowwise_adagrad", None), ("adam", None), ("sgd", "adam"), ("adam", "frozen")],
)
@pytest.mark.parametrize(
    ("dtype", "own_dtype"), [("float32", None), ("bfloat16", None), ("float32", "bfloat16"), ("float16", "float32")]
)
def test_a_bounded_table_is_whole(tmp_path, optimizer, own, dtype, own_dtype):
    """Untrained rows have initial values and no optimizer state. `own`, `own_dtype`: what the table names itself."""
    table = dataclasses.replace(SCHEMA.tables[1], optimizer=own, dtype=own_dtype)
    schema = dataclasses.replace(SCHEMA, optimizer=optimizer, tables=(table,), dtype=dtype)
    dtype = own_dtype or dtype
    folder = CheckpointFolder(tmp_path)
    generation = folder.new_generation()
    where = folder.step_folder(generation, 1)
    writer = RowWriter(folder.generation_folder(generation), schema, rank=0, epoch=1)
    trained = np.array([3, 0, 499])
    records = torch.zeros(3, schema.row_width(0), dtype=TORCH_DTYPE[dtype])
    parts = split_record(records, schema, 4, own)
    for part in parts:
        part.copy_(torch.arange(part.numel()).view(part.shape) + 7)
    writer.append([WriteRequest(0, trained, host_words(records))], 1)
    model, dense_optimizer = model_and_optimizer()
    sealed = Part(rank=0, dense=captured(model, dense_optimizer).save(where, 0), rows=writer.seal(where, 1))
    manifest = dataclasses.replace(manifest_of(generation, 1, (sealed,)), row_schema=schema.to_json())
    exported = collect(folder.publish(manifest), TABLES[1:2], DENSE, max_bytes=1 << 30)
    weight = exported.weights["ebc.embedding_bags.item.weight"]
    expected = initial_weights(schema.tables[0], np.arange(500), seed=schema.seed, dtype=dtype)
    expected[trained] = parts[0]
    assert weight.dtype == TORCH_DTYPE[dtype]
    assert torch.equal(weight, expected)
    states = {name.rpartition(".")[2]: value for name, value in exported.states.items() if name.startswith("ebc")}
    names = {"sgd": [], "frozen": [], "adam": ["exp_avg", "exp_avg_sq"]}.get(own or optimizer, ["sum"])
    assert list(states) == names
    for place, name in enumerate(names):
        untrained = np.delete(np.arange(500), trained)
        assert not states[name][untrained].any()
        found = states[name][trained].reshape(3, -1)
        assert torch.equal(found, parts[1][:, 4 * place :][:, : found.shape[1]])


def test_a_deleted_row_of_a_bounded_table_is_as_if_never_trained(saved, tmp_path):
    folder = CheckpointFolder(tmp_path)
    generation = folder.new_generation()
    first = save(folder, generation, 1, [{(1, 7): 7.0, (1, 9): 9.0, (1, 11): 11.0}])
    later = save(folder, generation, 2, [{(1, 11): 12.0}], before=first, gone={(1, 7), (1, 11)})
    tables = [unbounded(TABLES[0]), TABLES[1], unbounded(TABLES[2])]
    exported = collect(later, tables, DENSE, max_bytes=1 << 30)
    weight = exported.weights["ebc.embedding_bags.item.weight"]
    expected = initial_weights(SCHEMA.tables[1], np.arange(500), seed=SCHEMA.seed, dtype="float32")
    expected[9], expected[11] = 9.0, 12.0
    assert torch.equal(weight, expected)
    assert exported.states["ebc.embedding_bags.item.weight.sum"].nonzero().flatten().tolist() == [9, 11]


def test_dense_names_are_the_models_own(saved):
    model, optimizer = model_and_optimizer()
    exported = collect(saved, [unbounded(table) for table in TABLES], DENSE, max_bytes=1 << 30)
    again = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    again.load_state_dict({name: value for name, value in exported.weights.items() if not name.startswith("ebc")})
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    state = optimizer.state[next(model.parameters())]
    assert torch.equal(exported.states["0.weight.exp_avg"], state["exp_avg"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch warns that it loads in one process
def test_torch_reads_the_other_format(saved, tmp_path):
    """`torch.distributed.checkpoint.load` reads the files into tensors of equal shapes."""
    exported = collect(saved, [unbounded(table) for table in TABLES], DENSE, max_bytes=1 << 30)
    write_dcp(exported, tmp_path / "out")
    target = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in exported.weights.items()},
        "optimizer": {name: torch.zeros_like(tensor) for name, tensor in exported.states.items()},
    }
    dcp.load(target, checkpoint_id=tmp_path / "out", no_dist=True)
    for name, tensors in (("model", exported.weights), ("optimizer", exported.states)):
        assert all(torch.equal(target[name][key], tensor) for key, tensor in tensors.items())


def test_incompatible_settings_are_refused(saved, tmp_path):
    tables = [unbounded(table) for table in TABLES]
    with pytest.raises(InputError, match=r"GiB of memory, more than --max-gib .* \(the largest is"):
        collect(saved, tables, DENSE, max_bytes=1000)
    with pytest.raises(InputError, match=r"has tables \['item', 'shop', 'user'\], the model \['item', 'user'\]"):
        collect(saved, tables[:2], DENSE, max_bytes=1 << 30)
    with pytest.raises(InputError, match="has no '7.weight': it is of another model".replace(".", r"\.")):
        collect(saved, tables, ["7.weight"], max_bytes=1 << 30)
    with pytest.raises(InputError, match="table 'shop' has a row -"):
        collect(saved, [*tables[:2], TABLES[2]], DENSE, max_bytes=1 << 30)
    empty = CheckpointFolder(tmp_path / "dir").publish(manifest_of(1, 40))
    with pytest.raises(InputError, match="its job has not trained"):
        collect(empty, tables, DENSE, max_bytes=1 << 30)
    assert RowSchema.from_json(empty.manifest.row_schema) == SCHEMA
