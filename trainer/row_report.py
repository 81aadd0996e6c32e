"""The report of a namespace: rows and bytes of each table, in the store and in a checkpoint, and their ages.

    store ──ids, bucket states──> StoreRows ───────────┐
    checkpoint ──ids────────────> CheckpointState ─────┼──RowReport──> lines, or JSON
    RowAges ──rows by age───────> AgeLimits ───────────┘

Everything is read only, also while a job runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.folder import Checkpoint
from bagpipe.config.sections import StoreConfig
from bagpipe.errors import InputError
from bagpipe.store.fencing.presence import check_present
from bagpipe.store.sizing import server_bytes
from bagpipe.types.schema import RowSchema
from bagpipe.util.packages import needed_by
from trainer.row_ages import RowAges

__all__ = ["AgeLimits", "CheckpointState", "RowReport", "StoreRows", "TableRows", "report_of", "store_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRows:
    """The rows of a namespace.

    Attributes:
        namespace: its name.
        schema: of the rows.
        rows: of each table.
        checkpoint_ids: of each bucket; empty where there is none.
        job: the job that made the rows, and its end, in words; empty if no record says it.
        logs, groups: write logs of the bucket's owner, and the groups in them.
        leftover_logs, leftover_groups: the same of other starts: the next start recovers their rows and removes them.
    """

    namespace: str
    schema: RowSchema
    rows: tuple[int, ...]
    checkpoint_ids: tuple[str, ...]
    job: str
    logs: int
    groups: int
    leftover_logs: int
    leftover_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRows:
    """One table of a report. None: not known, without a store or a checkpoint.

    Attributes:
        name: of the table.
        rows: in the store; without one, in the checkpoint.
        row_bytes: of one record.
        record_bytes: of the records of these rows.
        server_bytes: estimated memory of a server for these rows, with keys and overhead.
        checkpoint_rows: in the checkpoint.
        older: rows of the checkpoint whose last use is longer ago than each limit of `AgeLimits`.
    """

    name: str
    rows: int
    row_bytes: int
    record_bytes: int
    server_bytes: int
    checkpoint_rows: int | None
    older: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """The checkpoint that the job would resume from.

    Attributes:
        generation: the start that made it. step: batches trained.
        rows: of all tables.
        agrees: the store has as many rows of each table; None: no store was read.
        buckets: buckets of the store that are at this checkpoint; None: no store was read.
    """

    generation: int
    step: int
    rows: int
    agrees: bool | None
    buckets: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeLimits:
    """The limits of ages.

    Attributes:
        unit: examples, steps or days.
        now: the clock at the checkpoint, in this unit.
        limits: ascending.
    """

    unit: str
    now: float
    limits: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReport:
    """A report. `store` and `checkpoint`: None where the command names none. `ages`: None unless limits are given."""

    store: StoreRows | None
    checkpoint: CheckpointState | None
    ages: AgeLimits | None
    tables: tuple[TableRows, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values; of the store without schema and rows, which `tables` have."""
        value = dataclasses.asdict(dataclasses.replace(self, store=None))
        if self.store is not None:
            store = {field.name: getattr(self.store, field.name) for field in dataclasses.fields(self.store)}
            left_out = ("schema", "rows", "checkpoint_ids")
            value["store"] = {name: item for name, item in store.items() if name not in left_out}
            value["store"]["buckets"] = len(self.store.checkpoint_ids)
        return value

    def lines(self) -> Iterator[str]:
        """The report for a person."""
        store, checkpoint, ages = self.store, self.checkpoint, self.ages
        if store is not None:
            owner = f", rows of {store.job}" if store.job else ""
            yield f"store.namespace {store.namespace!r}, {len(store.checkpoint_ids)} buckets{owner}"
            left = f"{store.leftover_logs} of other starts with {store.leftover_groups}"
            yield f"logs: {store.logs} of the newest start with {store.groups} groups, {left}"
        if checkpoint is not None:
            place = f"checkpoint: step {checkpoint.step} of start {checkpoint.generation}, {checkpoint.rows:,} rows"
            yield place + (self._agreement(checkpoint, store) if store is not None else "")
        if ages is not None:
            yield f"ages: at {ages.now:,.10g} {ages.unit}, the step of the checkpoint"
        yield from _aligned([self._heads(), *map(self._cells, (*self.tables, self._total()))])

    @staticmethod
    def _agreement(checkpoint: CheckpointState, store: StoreRows) -> str:
        number = "as many rows" if checkpoint.agrees else "another number of rows"
        return f": the store has {number}, {checkpoint.buckets} of {len(store.checkpoint_ids)} buckets are at it"

    def _heads(self) -> list[str]:
        heads = ["table", "rows", "MB of records", "MB in servers (estimated)"]
        if self.checkpoint is not None and self.store is not None:
            heads.append("in the checkpoint")
        if self.ages is not None:
            heads += [f"unused > {limit:g} {self.ages.unit}" for limit in self.ages.limits]
        return heads

    def _cells(self, table: TableRows) -> list[str]:
        cells = [table.name, f"{table.rows:,}", f"{table.record_bytes / 1e6:,.2f}", f"{table.server_bytes / 1e6:,.2f}"]
        if self.checkpoint is not None and self.store is not None:
            cells.append(f"{table.checkpoint_rows:,}")
        return cells + [f"{count:,}" for count in table.older or ()]

    def _total(self) -> TableRows:
        tables = self.tables
        return TableRows(
            name="all",
            rows=sum(table.rows for table in tables),
            row_bytes=0,
            record_bytes=sum(table.record_bytes for table in tables),
            server_bytes=sum(table.server_bytes for table in tables),
            checkpoint_rows=sum(table.checkpoint_rows or 0 for table in tables),
            older=None
            if self.ages is None
            else tuple(map(sum, zip(*(table.older or () for table in tables), strict=True))),
        )


def store_rows(url: str, config: StoreConfig, expected: RowSchema | None) -> StoreRows:
    """Read the rows of a namespace: the names of all rows, once.

    Args:
        url: of the servers, with the password.
        config: names the namespace.
        expected: schema of the checkpoint's rows; None: any.

    Raises:
        InputError: the URL names no servers, a server cannot be used, or the namespace has no record or other rows.
        StoreError: a server failed, or the namespace has lost rows.
    """
    if url.startswith("memory:"):
        raise InputError("store.url memory:// is private to one process: expected a server, or an empty one")
    with needed_by("store.url", "redis"):
        from bagpipe.store.redis.store import RedisStore
        from bagpipe.store.redis.stored_record import backends_of, stored_record

    record = stored_record(backends_of(url), config.namespace, timeout_s=config.timeout_s, expected=expected)
    schema = record.schema
    opened = RedisStore(
        url, schema=schema, namespace=config.namespace, num_buckets=record.num_buckets, timeout_s=config.timeout_s
    )
    with opened as store, store.ledger() as ledger:
        states, job = ledger.state(), ledger.job()
        check_present(states, job, namespace=f"namespace {config.namespace!r}")
        rows = tuple(store.num_rows().tolist())
    logs = [(log.token == state.owner, log.num_groups) for state in states for log in state.logs]
    return StoreRows(
        namespace=config.namespace,
        schema=schema,
        rows=rows,
        checkpoint_ids=tuple(state.checkpoint_id for state in states),
        job="" if job is None else job.describe(),
        logs=sum(is_own for is_own, _ in logs),
        groups=sum(groups for is_own, groups in logs if is_own),
        leftover_logs=sum(not is_own for is_own, _ in logs),
        leftover_groups=sum(groups for is_own, groups in logs if not is_own),
    )


def report_of(
    store: StoreRows | None, checkpoint: Checkpoint | None, ages: RowAges | None, limits: Sequence[float]
) -> RowReport:
    """The report of a store, a checkpoint, or both.

    Args:
        store: the rows of the store; None: there is none.
        checkpoint: a valid one; None: there is none. At least one of the two is given.
        ages: of the rows of the checkpoint; None: not asked for.
        limits: of ages, in the unit of `ages`.
    """
    rows = None
    if checkpoint is not None:
        rows = CheckpointRows(
            checkpoint.folder, checkpoint.manifest, RowSchema.from_json(checkpoint.manifest.row_schema)
        )
    schema = store.schema if store is not None else rows.schema if rows is not None else None
    assert schema is not None, "there is a store or a checkpoint"
    counts = []
    older: list[tuple[int, ...] | None] = []
    for table in range(len(schema.tables)):
        ids = None if rows is None else rows.ids(table)
        counts.append(None if ids is None else len(ids))
        older.append(None if ages is None or ids is None else _older(ages, table, ids, limits))
    tables = tuple(
        _table_rows(schema, table, count if store is None else store.rows[table], count, older[table])
        for table, count in enumerate(counts)
    )
    return RowReport(
        store=store,
        checkpoint=None if checkpoint is None else _state_of(checkpoint, store, counts),
        ages=None if ages is None else AgeLimits(unit=ages.unit, now=ages.now, limits=tuple(limits)),
        tables=tables,
    )


def _older(ages: RowAges, table: int, ids: NDArray[np.int64], limits: Sequence[float]) -> tuple[int, ...]:
    return tuple(ages.count_older(table, ids, limit) for limit in limits)


def _table_rows(
    schema: RowSchema, table: int, rows: int | None, checkpoint_rows: int | None, older: tuple[int, ...] | None
) -> TableRows:
    assert rows is not None, "of the store or of the checkpoint"
    row_bytes = schema.row_bytes(table)
    return TableRows(
        name=schema.tables[table].name,
        rows=rows,
        row_bytes=row_bytes,
        record_bytes=rows * row_bytes,
        server_bytes=rows * server_bytes(row_bytes),
        checkpoint_rows=checkpoint_rows,
        older=older,
    )


def _state_of(checkpoint: Checkpoint, store: StoreRows | None, counts: Sequence[int | None]) -> CheckpointState:
    manifest = checkpoint.manifest
    return CheckpointState(
        generation=manifest.generation,
        step=manifest.step,
        rows=sum(count or 0 for count in counts),
        agrees=None if store is None else list(store.rows) == list(counts),
        buckets=None if store is None else store.checkpoint_ids.count(manifest.checkpoint_id),
    )


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        yield "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
