"""Admission and expiry of rows as a configuration says it: data.min_uses, data.expire_after and the keys beside them.

DataConfig, columns ──admission_rules──> AdmissionRules ──admitted_schema──> columns of the batches
                    ──expiry_rules─────> ExpiryRules ────row_stage─────────> what a loader does to its batches
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from bagpipe.config.optim_section import pairs
from bagpipe.config.sections import DataConfig
from bagpipe.oracle.admission import AdmissionRules, RowAdmission
from bagpipe.oracle.expiry import ExpiryRules, RowExpiry
from bagpipe.oracle.plan import RowList
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema

__all__ = ["BatchStage", "RowStage", "admission_rules", "admitted_schema", "expiry_rules", "row_stage"]

#: Changes batches in their order.
BatchStage: TypeAlias = Callable[[Batch], Batch]


def admission_rules(config: DataConfig, schema: DataSchema) -> AdmissionRules | None:
    """The rules of a data set; None: every row is admitted at its first use.

    Args:
        config: `data` section.
        schema: columns of the source.
    """
    own = {table: int(uses) for table, uses in pairs(config.min_uses_by_table)}
    known = {table.name for table in schema.tables}
    least = {**dict.fromkeys(known, config.min_uses), **own}
    # A table that the data does not have is refused, whatever its uses.
    min_uses = {table: uses for table, uses in least.items() if uses > 1 or table not in known}
    if not min_uses:
        return None
    return AdmissionRules(
        min_uses=min_uses,
        absent="default" if config.default_row == "trained" else "zero",
        sketch_cells=config.sketch_cells if config.use_counts == "sketch" else 0,
    )


def admitted_schema(config: DataConfig, schema: DataSchema) -> DataSchema:
    """The columns of the batches: their tables say what rows that are not admitted read.

    Raises:
        InputError: see `AdmissionRules.schema`.
    """
    rules = admission_rules(config, schema)
    return schema if rules is None else rules.schema(schema)


def expiry_rules(config: DataConfig, schema: DataSchema) -> ExpiryRules | None:
    """The rules by which rows of a data set expire; None: none does.

    Args:
        config: `data` section.
        schema: columns of the source.

    Raises:
        InputError: a table that the data does not have.
    """
    if not config.expires:
        return None
    own = {table: float(limit) for table, limit in pairs(config.expire_after_by_table)}
    known = {table.name for table in schema.tables}
    limits = {**dict.fromkeys(known, config.expire_after), **own}
    rules = ExpiryRules(
        # A table that the data does not have is refused, whatever its limit.
        limits={table: limit for table, limit in limits.items() if limit or table not in known},
        unit=config.expire_unit,
        every=config.expire_every,
    )
    rules.check(schema)
    return rules


class RowStage:
    """Admits the rows of training batches, and tells which are born and which expire. Batches come in order.

    Args:
        admission: replaces the ids of rows that are not admitted; None: all are.
        expiry: follows the uses of rows; None: none expires.
    """

    def __init__(self, admission: RowAdmission | None, expiry: RowExpiry | None) -> None:
        self._admission = admission
        self._expiry = expiry

    def know(self, rows: RowList) -> None:
        """Rows, by number of the data's table, that are there before the first batch: admitted, as old as the job."""
        for part in (self._admission, self._expiry):
            if part is not None:
                part.know(rows)

    def __call__(self, batch: Batch) -> Batch:
        """The batch as the planner gets it.

        Raises:
            InputError: an id outside its table, or that of a default row; or the clock needs times that are not there.
        """
        expired = None if self._expiry is None else self._expiry.begin(batch)
        if self._admission is not None:
            if expired is not None:
                self._admission.forget(expired)
            batch = self._admission.admit(batch)
        return batch if self._expiry is None else self._expiry.follow(batch, expired)


def row_stage(
    config: DataConfig, schema: DataSchema, phase: Literal["train", "eval"], known: RowList | None = None
) -> BatchStage | None:
    """Stage of a loader that follows rows, or checks ids; None: rows are admitted at once, and do not expire.

    The uses of training batches are counted, and their ids of rows that are not admitted are replaced. Batches to score
    keep their ids: a row that the store does not have was not admitted, or has expired.

    Args:
        config: `data` section.
        schema: columns of the source.
        phase: train or eval.
        known: rows, by number of the data's table, that are there before the first batch; None: there are none.
    """
    rules, expiry = admission_rules(config, schema), expiry_rules(config, schema)
    admission = None if rules is None else RowAdmission(schema, rules)
    if phase == "train" and not config.scored:
        if admission is None and expiry is None:
            return None
        admitted = admitted_schema(config, schema)
        stage = RowStage(admission, None if expiry is None else RowExpiry(admitted, expiry))
        if known is not None:
            stage.know(known)
        return stage
    return None if admission is None else admission.check
