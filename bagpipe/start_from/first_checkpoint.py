"""`FirstCheckpoint`: makes checkpoint 0 of a new job from other weights.

    open_source ──Source──> compare ──Takings──> stderr; refused before anything is changed
                            write   ──row files, dense files──> folder of step 0 ──Manifest──> published by the caller

One rank makes it. The job then begins as one that resumes checkpoint 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from bagpipe.checkpoint.dense_state import MODEL
from bagpipe.checkpoint.manifest import KNOWN_ROWS, Manifest, Part
from bagpipe.checkpoint.row_file import NAME_DTYPE, RecordFile
from bagpipe.errors import InputError
from bagpipe.start_from.dense import DensePlan, JobDense, first_state, match_dense
from bagpipe.start_from.job_plan import JobPlan, part_tensors
from bagpipe.start_from.job_settings import follows_rows, optimizer_name
from bagpipe.start_from.job_state import StateOfJob, match_job
from bagpipe.start_from.open_source import open_source
from bagpipe.start_from.source import Source
from bagpipe.start_from.tables import TablePlan, hashed_tables, match_tables, write_rows
from bagpipe.start_from.takings import Takings
from bagpipe.types.schema import RowSchema
from bagpipe.util.program import note

__all__ = ["FirstCheckpoint", "NewJob"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """The job that begins.

    Attributes:
        rows: schema of its rows.
        dense: its dense part.
        settings: that affect its results, by name.
        world_size: number of its ranks.
        parts: names of its parts that keep state -> the tensors that this rank has of it at first, by name.
    """

    rows: RowSchema
    dense: JobDense
    settings: Mapping[str, Any]
    world_size: int
    parts: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def state(self) -> StateOfJob:
        """What its state besides rows and dense weights depends on."""
        weights = self.dense.initial.below(MODEL)
        return StateOfJob(
            settings=self.settings,
            seed=self.rows.seed,
            world_size=self.world_size,
            parts=self.parts,
            trainable={name: weights[name] for name in self.dense.trainable},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    source: Source
    tables: Sequence[TablePlan]
    dense: DensePlan
    job: JobPlan
    takings: Takings


class FirstCheckpoint:
    """Checkpoint 0 of one job.

    Args:
        where: `checkpoint.start_from`.
        without: `checkpoint.start_without`.
        job: the job.
    """

    def __init__(self, where: str, without: Sequence[str], job: NewJob) -> None:
        self._where = where
        self._without = tuple(without)
        self._job = job
        self._plan: _Plan | None = None

    def compare(self) -> None:
        """Open the source, compare it with the job, and print what is taken on stderr. Changes nothing.

        Raises:
            InputError: there is no such source, something of one name does not fit, or nothing is taken.
        """
        job, source = self._job, open_source(self._where)
        tables, table_items = match_tables(source.tables, job.rows, hashed_tables(job.settings), self._without)
        name, outline = optimizer_name(source.settings), source.outline(job.dense.names)
        dense, dense_items = match_dense(outline, job.dense, name, self._without)
        counts, job_items = match_job(source, outline, job.state, dense, tables, self._without)
        takings = Takings(source=source.label, items=(*table_items, *dense_items, *job_items))
        note("\n  ".join([f"this job starts from {takings.source} and takes:", *takings.lines()]))
        if takings.clashes:
            first = takings.clashes[0]
            raise InputError(
                f"checkpoint.start_from {self._where} does not fit this job: {first.label}: {first.detail} "
                f"({len(takings.clashes)} such things, see above): checkpoint.start_without = "
                f'["{first.label}"] begins it anew'
            )
        if takings.is_empty:
            raise InputError(
                f"checkpoint.start_from {self._where} has nothing that fits this job: expected tables "
                f"{[table.name for table in job.rows.tables]}, it has {list(source.tables)}"
            )
        self._plan = _Plan(source=source, tables=tables, dense=dense, job=counts, takings=takings)

    def write(self, folder: Path, manifest: Manifest) -> Manifest:
        """Write the files of checkpoint 0, after `compare`.

        Args:
            folder: of the checkpoint; exists.
            manifest: without files.

        Returns:
            The manifest with the files, to be published.

        Raises:
            InputError: the source cannot be read any more, or a weight is beyond the range of its new dtype.
            OSError: a file cannot be written.
        """
        plan, job = self._plan, self._job
        assert plan is not None, "compared before"
        known: dict[str, Any] = {}
        if follows_rows(job.settings):
            with RecordFile(folder / KNOWN_ROWS, NAME_DTYPE) as names:
                base = write_rows(folder, job.rows, plan.tables, names)
            known = {"known_rows": dataclasses.asdict(names.entry)}
        else:
            base = write_rows(folder, job.rows, plan.tables)
        parts = []
        for rank in range(job.world_size):
            theirs = plan.source.dense(rank, plan.dense.weights)
            state = first_state(
                plan.dense,
                theirs,
                job.dense,
                takes_random=plan.job.takes_random,
                parts=part_tensors(plan.job, theirs),
            )
            parts.append(Part(rank=rank, dense=state.save(folder, rank), progress=plan.job.progress))
        origin = {
            "rows_step": plan.source.counts.rows if any(table.takes_state for table in plan.tables) else 0,
            "schedule_step": plan.job.schedule_step,
            "dense_step": plan.job.dense_step,
            "masks_step": plan.job.masks_step,
            "checkpoint_id": plan.source.checkpoint_id,
            "takings": plan.takings.to_json(),
            **known,
        }
        return dataclasses.replace(manifest, world_size=job.world_size, parts=tuple(parts), base=base, origin=origin)
