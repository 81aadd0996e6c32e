"""A job reduced to its rows: cache, fenced writers, checkpoints, crashes. No model and no threads."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.files import finish
from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.checkpoint.journal import RowWriter, save_dirty
from bagpipe.checkpoint.manifest import Part
from bagpipe.checkpoint.publisher import Publisher
from bagpipe.checkpoint.recovery import Recovered, recover
from bagpipe.store.audit import stored_sums
from bagpipe.store.fencing.fence import Fence, Ledger
from bagpipe.store.interface import Store
from bagpipe.store.row_sums import RowSums
from tests.checkpoint.samples import LINEAGE, SCHEMA, Model, deletions, empty_manifest, requests


def no_warning(line: str) -> None:
    raise AssertionError(line)


def stored(store: Store) -> Model:
    """All rows of a store. The elements of a row are equal."""
    found: Model = {}
    for table in range(len(SCHEMA.tables)):
        ids = store.ids(table)
        rows = store.read(table, ids).rows
        assert (rows == rows[:, :1]).all()
        found |= {(table, int(number)): float(row[0]) for number, row in zip(ids, rows, strict=True)}
    return found


def sums_of_stored(store: Store, tables: NDArray[np.uint32], ids: NDArray[np.int64]) -> RowSums:
    """Sums of the check words that the store has for these rows."""
    sums = RowSums(store.sum_changes().num_buckets)
    for table in np.unique(tables).tolist():
        named = ids[tables == table]
        sums.add_rows(np.array([table], np.uint32), named, store.read(table, named).checks)
    return sums


@dataclass(slots=True, kw_only=True, eq=False)
class RowsOfJob:
    """One start of a job whose writers take turns.

    Attributes:
        stores: entered stores by rank.
        newest: current value of every row.
        dirty: rows newer than the store's -> rank that holds them.
        num_deletions: deletions so far of each row: another rank holds the row that comes after.
        committed: checkpoint id -> values of all rows.
    """

    folder: CheckpointFolder
    stores: list[Store]
    ledger: Ledger
    token: str
    recovered: Recovered
    publishers: list[Publisher]
    newest: Model
    committed: dict[str, Model]
    journals: list[RowWriter] = field(default_factory=list)
    dirty: dict[tuple[int, int], int] = field(default_factory=dict)
    num_deletions: Counter[tuple[int, int]] = field(default_factory=Counter)
    step: int = 0
    epoch: int = 1

    @classmethod
    def start(
        cls,
        stack: ExitStack,
        folder: CheckpointFolder,
        stores: list[Store],
        ledger: Ledger,
        committed: dict[str, Model],
        **options: int,
    ) -> RowsOfJob:
        """Start from the newest checkpoint of the folder, or from scratch."""
        found = folder.newest(no_warning)
        generation = folder.new_generation()
        token = f"{generation}-{secrets.token_hex(16)}"
        if found is None:
            found = folder.publish(empty_manifest(generation, token))
            committed[found.manifest.checkpoint_id] = {}
        rows = CheckpointRows(found.folder, found.manifest, SCHEMA)
        done = recover(stores[0], ledger, token=token, checkpoint=found.manifest, rows=rows, num_writers=len(stores))
        for rank, store in enumerate(stores):
            store.fence(Fence(token=token, writer=rank, epoch=1))
        first_sums = stored_sums(stores[0])
        template = empty_manifest(generation, token, world_size=len(stores))
        publishers = [
            Publisher(folder, found, template, SCHEMA, rank=rank, ledger=None if rank else ledger, **options)
            for rank in range(len(stores))
        ]
        publishers[0].first_sums = first_sums
        job = cls(
            folder=folder,
            stores=stores,
            ledger=ledger,
            token=token,
            recovered=done,
            publishers=publishers,
            newest=dict(committed[found.manifest.checkpoint_id]),
            committed=committed,
            step=found.manifest.step,
        )
        job.open_journals()
        stack.callback(job.close)
        return job

    @property
    def generation(self) -> int:
        return int(self.token.partition("-")[0])

    def open_journals(self) -> None:
        folder = self.folder.generation_folder(self.generation)
        self.journals = [RowWriter(folder, SCHEMA, rank=rank, epoch=self.epoch) for rank in range(len(self.stores))]

    def close(self) -> None:
        for journal in self.journals:
            journal.discard()

    def train(self, rows: Model) -> None:
        """Change these rows, as a batch does. The rank of an id owns its row, the next one after each deletion."""
        self.step += 1
        self.newest |= rows
        self.dirty |= {key: (key[1] + self.num_deletions[key]) % len(self.stores) for key in rows}

    def write_back(self, share: float, random: np.random.Generator) -> None:
        """Write rows back as they leave the cache."""
        for rank, store in enumerate(self.stores):
            keys = [key for key, owner in self.dirty.items() if owner == rank and random.random() < share]
            written = [
                replace(request, replaced=store.read(request.table, request.ids).checks)
                for request in requests({key: self.newest[key] for key in sorted(keys)})
            ]
            store.write_many(written)
            self.journals[rank].append(written, self.step)
            for key in keys:
                del self.dirty[key]

    def delete(self, keys: Collection[tuple[int, int]]) -> None:
        """Delete rows that expire before the next batch. They leave the caches without a write-back."""
        asked = deletions(keys)
        self.stores[0].delete_many(asked)
        self.journals[0].delete(asked, self.step)
        self.num_deletions.update(keys)
        for key in keys:
            self.newest.pop(key, None)
            self.dirty.pop(key, None)

    def snapshot(self) -> list[Part]:
        """Every rank's part of a checkpoint of the current state. Later writes belong to the next interval."""
        where = self.folder.step_folder(self.generation, self.step)
        parts = []
        for rank, store in enumerate(self.stores):
            keys = sorted(key for key, owner in self.dirty.items() if owner == rank)
            self.journals[rank].append(requests({key: self.newest[key] for key in keys}), self.step)
            dense = where / f"dense-{rank:04d}.safetensors"
            dense.write_bytes(b"dense")
            names = np.array(keys, np.int64).reshape(-1, 2)
            tables, ids = names[:, 0].astype(np.uint32), names[:, 1]
            sums = store.sum_changes()
            sums -= sums_of_stored(store, tables, ids)
            parts.append(
                Part(
                    rank=rank,
                    dense=finish(dense),
                    rows=self.journals[rank].seal(where, self.step),
                    dirty=save_dirty(where, rank=rank, tables=tables, ids=ids),
                    num_groups=tuple(store.rotate().tolist()),
                    row_sums=tuple(sums.to_list()),
                )
            )
        self.committed[f"{LINEAGE}:{self.token}:{self.step}"] = dict(self.newest)
        self.epoch += 1
        self.open_journals()
        return parts

    def publish(self, step: int, parts: list[Part]) -> None:
        """Publish, right after `snapshot` or later. Rank 0 comes last, since no rank waits here."""
        epoch = self.epoch - 1
        for publisher, part in reversed(list(zip(self.publishers, parts, strict=True))):
            publisher(step, epoch, part)
