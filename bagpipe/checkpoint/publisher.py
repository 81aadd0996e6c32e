"""`Publisher`: combines all ranks' parts into one checkpoint and commits it to the store.

    every rank: Part ──write_part──> folder          rank 0: ──read_parts──> replicas equal? ──> Manifest ──publish──>
                                                             ──commit──> new ids in the store, logs removed ──>
                                                             mirror, prune

Each rank's publisher thread calls it for one checkpoint after the other. When the call returns on rank 0, a restart
finds the checkpoint; on another rank, its part is durable.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.checkpoint.manifest import Manifest, Part, RowFile
from bagpipe.checkpoint.merge import merge_files
from bagpipe.checkpoint.mirror import MirrorThread
from bagpipe.errors import JobError
from bagpipe.store.fencing.fence import Ledger
from bagpipe.store.row_sums import RowSums
from bagpipe.types.schema import RowSchema
from bagpipe.util.failpoints import hit

__all__ = ["Publisher"]

#: First and largest interval between two polls for other ranks' parts.
_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.2


class Publisher:
    """One rank's publisher. One thread calls it; `close` is thread-safe.

    Args:
        folder: directory of the checkpoints.
        resumed: the checkpoint the job resumes from.
        template: manifest with the constant fields of all checkpoints.
        schema: schema of the rows.
        rank: this rank.
        ledger: the owner's entered ledger; rank 0 only.
        keep, full_every: see `CheckpointConfig`.
        timeout_s: deadline for other ranks' parts.
        mirror: takes each published checkpoint; rank 0 only.

    Attributes:
        num_published: number of checkpoints published so far.
        newest: the last published checkpoint; rank 0 only.
        first_sums: sums of the store's rows at the job's start, known before the first call; rank 0 only.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        resumed: Checkpoint,
        template: Manifest,
        schema: RowSchema,
        *,
        rank: int = 0,
        ledger: Ledger | None = None,
        keep: int = 2,
        full_every: int = 16,
        timeout_s: float = 120.0,
        mirror: MirrorThread | None = None,
    ) -> None:
        if rank == 0 and ledger is None:
            raise ValueError("expected a ledger for rank 0, got None")
        self.newest = resumed
        self.num_published = 0
        self.first_sums: RowSums | None = None
        self._folder = folder
        self._template = template
        self._schema = schema
        self._rank = rank
        self._ledger = ledger
        self._keep = keep
        self._full_every = full_every
        self._timeout_s = timeout_s
        self._mirror = mirror
        self._closed = threading.Event()

    def close(self) -> None:
        """Cancel a pending publication and all waits. Thread-safe."""
        self._closed.set()

    def __call__(self, step: int, epoch: int, part: Part) -> None:
        """Write this rank's part, whose logs end with `epoch`. Rank 0 then publishes and commits.

        Raises:
            FencedError: another job has taken over the folder.
            JobError: a part is late, the replicas differ, or the publisher was closed.
            OSError: a file operation failed.
            StoreError: the commit failed; the checkpoint is published nevertheless.
        """
        self._folder.check_newest(self._template.generation)
        self._folder.write_part(self._template.generation, step, part)
        if self._rank == 0:
            self._publish(step, epoch)
        self.num_published += 1

    def _publish(self, step: int, epoch: int) -> None:
        assert self._ledger is not None, "checked by the constructor"
        generation = self._template.generation
        parts = self._await_parts(step)
        _check_replicas(step, parts)
        parent = self.newest
        manifest = dataclasses.replace(
            self._template,
            step=step,
            parent_checkpoint_id=parent.manifest.checkpoint_id,
            epoch=epoch,
            parts=parts,
            base=self._base(parent, self._folder.step_folder(generation, step)),
            row_sums=self._row_sums(parts),
        )
        self.newest = self._folder.publish(manifest, sources=[parent.folder])
        for part in self.newest.folder.glob("part-*.json"):  # not those of this step's next checkpoint
            part.unlink()
        self._ledger.commit(manifest.checkpoint_id, manifest.epoch, [part.num_groups for part in parts])
        hit("after-commit")
        if self._mirror is not None:
            self._mirror.offer(self.newest)
        self._folder.prune(self._keep, self.newest, () if self._mirror is None else self._mirror.held())

    def _row_sums(self, parts: Sequence[Part]) -> tuple[int, ...]:
        if self.first_sums is None:
            return ()
        return tuple(sum((RowSums.of(part.row_sums) for part in parts), self.first_sums).to_list())

    def _await_parts(self, step: int) -> tuple[Part, ...]:
        generation, world_size = self._template.generation, self._template.world_size
        deadline_s, pause_s = time.monotonic() + self._timeout_s, _FIRST_POLL_S
        while (parts := self._folder.read_parts(generation, step, world_size)) is None:
            if self._closed.wait(pause_s):
                raise JobError(f"the checkpoint at step {step} was cancelled: the job has ended")
            if time.monotonic() > deadline_s:
                raise JobError(
                    f"the checkpoint at step {step}: not all ranks wrote their part in {self._timeout_s:g} s"
                )
            pause_s = min(2 * pause_s, _LAST_POLL_S)
        return parts

    def _base(self, parent: Checkpoint, target: Path) -> tuple[RowFile, ...]:
        """Base row files of the next checkpoint: its parent's, or full files merged from them."""
        files = parent.manifest.row_files
        if len({file.step for file in files if not file.full}) < self._full_every:
            return files
        return merge_files(
            parent.folder,
            files,
            self._schema,
            target=target,
            step=parent.manifest.step,
            on_chunk=self._check_open,
        )

    def _check_open(self, num_rows: int) -> None:
        if self._closed.is_set():
            raise JobError("the merge of row files was cancelled: the job has ended")


def _check_replicas(step: int, parts: Sequence[Part]) -> None:
    """Compare the digests of replicas.

    Raises:
        JobError: two replicas differ; names the first two.
    """
    digests: dict[str, tuple[int, str]] = {}
    for part in parts:
        for stage, digest in part.progress.get("dense", {}).items():
            rank, first = digests.setdefault(stage, (part.rank, digest))
            if first != digest:
                raise JobError(
                    f"the checkpoint at step {step}: ranks {rank} and {part.rank} hold different dense parameters "
                    f"({stage}, digests {first} and {digest})"
                )
