"""Another job's checkpoint as what a new job takes from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bagpipe.checkpoint.dense_state import MODEL, OwnState
from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.dense.parallel.shard_layout import Piece
from bagpipe.start_from.checkpoint_source import CheckpointSource
from bagpipe.start_from.open_source import open_source
from bagpipe.start_from.source import Counts, Extent
from tests.checkpoint.samples import SCHEMA, captured, model_and_optimizer, save, three_checkpoints


@pytest.mark.parametrize(("chosen", "number"), [("", 2), ("@20", 1), ("@10", 0)])
def test_its_rows_dense_part_and_counts(tmp_path: Path, chosen: str, number: int) -> None:
    _, checkpoints, models = three_checkpoints(tmp_path / "a")
    step = (number + 1) * 10
    source = open_source(f"{tmp_path / 'a'}{chosen}")
    assert isinstance(source, CheckpointSource)
    assert source.label == f"the checkpoint of step {step} in {tmp_path / 'a'}"
    assert (source.seed, source.world_size) == (0, 2)
    assert source.checkpoint_id == checkpoints[number].manifest.checkpoint_id
    progress = checkpoints[number].manifest.parts[0].progress
    assert source.counts == Counts(rows=step, schedule=step, dense=step, masks=step, progress=progress)
    for place, table in enumerate(SCHEMA.tables):
        found = source.tables[table.name]
        ids = sorted(row_id for at, row_id in models[number] if at == place)
        values = [models[number][place, row_id] for row_id in ids]
        assert found.extent() == Extent(num_rows=len(ids), least=ids[0], largest=ids[-1])
        chunks = list(found.chunks())
        assert [row_id for chunk in chunks for row_id in chunk.ids.tolist()] == ids
        expected = torch.tensor(values, dtype=torch.float32)[:, None]
        assert torch.equal(torch.cat([chunk.weights for chunk in chunks]), expected.expand(-1, table.dim))
        states = [chunk.state for chunk in chunks if chunk.state is not None]
        assert torch.equal(torch.cat(states), expected)
    model, _ = model_and_optimizer()
    for rank in (0, 1, 5):
        state = source.dense(rank, frozenset())
        assert all(torch.equal(state.tensors[f"model.{name}"], value) for name, value in model.state_dict().items())
        assert state.rng()


def test_a_dense_part_that_ranks_have_divided_is_taken_whole(tmp_path: Path) -> None:
    model, _ = model_and_optimizer()
    names = [name for name, _ in model.named_parameters()]
    pieces = {
        f"model.{name}": (Piece(first=0, shape=tuple(value.shape)), value.detach().reshape(-1))
        for name, value in model.named_parameters()
    }
    whole = frozenset(name for name, _ in model.named_buffers())
    shares = [
        captured(model, only=whole, own=OwnState(pieces={f"model.{names[0]}": pieces.pop(f"model.{names[0]}")})),
        captured(model, only=set(), own=OwnState(pieces=pieces)),
    ]
    folder = CheckpointFolder(tmp_path / "a")
    save(folder, folder.new_generation(), 10, [{}, {}], shares=shares)
    source = open_source(str(tmp_path / "a"))
    for rank in (0, 1, 5):
        found = source.dense(rank, frozenset()).below(MODEL)
        assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
