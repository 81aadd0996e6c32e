"""Another job's rows as the first checkpoint of a job."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import pytest

from bagpipe.checkpoint.adoption import adopt
from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.errors import FencedError
from bagpipe.store.memory.store import MemoryStore
from bagpipe.testing.fence_jobs import new_token, take_over
from tests.checkpoint.samples import LINEAGE, SCHEMA, empty_manifest


def fill(store: MemoryStore) -> None:
    random = np.random.default_rng(0)
    for table in range(len(SCHEMA.tables)):
        ids = np.unique(random.integers(-(2**62), 2**62, 300))
        store.write(table, ids, random.normal(size=(len(ids), SCHEMA.row_width(table))).astype(np.float32))


def test_the_checkpoint_has_the_rows_and_the_store_keeps_them(tmp_path: Path) -> None:
    """Also if an earlier attempt was killed between the files and the ids."""
    with MemoryStore(SCHEMA, name=uuid.uuid4().hex, num_buckets=4) as store:
        fill(store)
        before = [(store.ids(table), store.read(table, store.ids(table)).rows) for table in range(len(SCHEMA.tables))]
        for _ in range(2):
            folder, token = CheckpointFolder(tmp_path), new_token(1)
            generation = folder.new_generation()
            with store.ledger() as ledger:
                adopted = adopt(
                    store, ledger, token=token, folder=folder, manifest=empty_manifest(generation, token), num_writers=2
                )
                states = ledger.state()
            assert {(state.owner, state.checkpoint_id) for state in states} == {(token, f"{LINEAGE}:{token}:0")}
            assert folder.newest(pytest.fail) == adopted
            rows = CheckpointRows(adopted.folder, adopted.manifest, SCHEMA)
            assert rows.count(4).tolist() == [state.num_rows for state in states]
            for table, (ids, values) in enumerate(before):
                assert (rows.ids(table) == ids).all()
                assert rows.read(table, ids).rows.tobytes() == values.tobytes()
                assert store.read(table, ids).rows.tobytes() == values.tobytes()


def test_a_job_that_is_taken_over_meanwhile_begins_nothing(tmp_path: Path) -> None:
    class Overtaken(MemoryStore):
        def ids(self, table: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            with MemoryStore(SCHEMA, name=name, num_buckets=4) as other:
                take_over(other, generation=2)
            return super().ids(table)

    name = uuid.uuid4().hex
    folder, token = CheckpointFolder(tmp_path), new_token(1)
    manifest = empty_manifest(folder.new_generation(), token)
    with Overtaken(SCHEMA, name=name, num_buckets=4) as store, store.ledger() as ledger:
        with pytest.raises(FencedError):
            adopt(store, ledger, token=token, folder=folder, manifest=manifest, num_writers=1)
        assert {state.checkpoint_id for state in ledger.state()} == {"test:0"}
