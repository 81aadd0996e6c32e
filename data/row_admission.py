"""The admission of rows as a configuration says it: data.min_uses and the keys beside it.

DataConfig, columns ──admission_rules──> AdmissionRules ──admitted_schema──> columns of the batches
                                                        ──admission_stage──> what a loader does to its batches
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from bagpipe.config.optim_section import pairs
from bagpipe.config.sections import DataConfig
from bagpipe.oracle.admission import AdmissionRules, RowAdmission
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema

__all__ = ["BatchStage", "admission_rules", "admission_stage", "admitted_schema"]

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


def admission_stage(config: DataConfig, schema: DataSchema, phase: Literal["train", "eval"]) -> BatchStage | None:
    """Stage of a loader that admits rows, or checks ids; None: every row is admitted at once.

    Training batches are counted, and their ids of rows that are not admitted are replaced. Batches to score keep their
    ids: a row that the store does not have was not admitted.
    """
    rules = admission_rules(config, schema)
    if rules is None:
        return None
    admission = RowAdmission(schema, rules)
    return admission.admit if phase == "train" and not config.scored else admission.check
