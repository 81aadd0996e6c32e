"""`LogTables`: numbers and record sizes of a log's rows as the trainer has them, without building the model.

DataSchema, Config ─> tables by number (equal dimensions and poolings adjacent) ─> OracleSpec, bytes of a row

A user's own model (``model.factory``) can have other tables than the zoo's models; replay assumes the zoo's: one table
per table of the data.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self, cast

import numpy as np
from numpy.typing import NDArray

from bagpipe.config.row_optimizers import row_optimizers
from bagpipe.config.sections import Config, Policy
from bagpipe.optim import OTHERS, shared_optimizer
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.types.schema import ROW_TYPES, DataSchema, RowSchema, RowTable, Table
from data.replay.next_use_file import LOG_POLICY

__all__ = ["LogTables", "at_setting"]

#: Extra weights per row by model: the linear part of Wide & Deep, the first-order term of DeepFM.
EXTRA_DIM = {"wide-deep": 1, "deepfm-fuxictr": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTables:
    """Tables of a log, by table number.

    Attributes:
        rows: their schema in the store.
        features: occurrence segments, as in `OracleSpec.features`.
    """

    rows: RowSchema
    features: tuple[FeatureRef, ...]

    @classmethod
    def of(cls, schema: DataSchema, config: Config) -> Self:
        """The tables of the configured model for a data set, numbered as `convert` numbers them."""
        extra = EXTRA_DIM.get(config.model.name, 0) if not config.model.factory else 0

        def dim_of(table: Table) -> int:
            return (table.dim or config.model.embedding_dim) + extra

        # finalmlp's gates have tables of their own.
        gates = (schema.context(config.model.gate_context(key), key) for key in ("first_gate", "second_gate"))
        collections = [schema, *(gate for gate in gates if gate is not None and not config.model.factory)]
        # Tables that only a model of the user's has can be named too; the trainer checks the names.
        given = row_optimizers(config.optim)
        updates = {
            table.name: given.get(table.name, given[OTHERS])
            for collection in collections
            for table in collection.tables
        }
        shared, kinds = shared_optimizer([*updates.values()]), {name: each.record for name, each in updates.items()}
        groups: dict[tuple[int, bool, int, str], list[Table]] = {}
        for number, collection in enumerate(collections):
            for table in collection.tables:
                key = number, table.pooling == "mean", dim_of(table), kinds[table.name]
                groups.setdefault(key, []).append(table)
        tables = [table for group in groups.values() for table in group]
        positions = {feature.name: position for position, feature in enumerate(schema.features)}
        features = (
            FeatureRef(feature=positions[feature.name], table=number)
            for number, table in enumerate(tables)
            for collection in collections
            for feature in collection.features
            if feature.table == table.name
        )
        return cls(
            rows=RowSchema(
                tables=tuple(
                    RowTable(
                        name=table.name,
                        dim=dim_of(table),
                        rows=table.num_ids,
                        optimizer=None if kinds[table.name] == shared else kinds[table.name],
                    )
                    for table in tables
                ),
                optimizer=shared,
                dtype=config.row_dtype,
                seed=config.run.seed,
                rounding=config.row_rounding,
            ),
            features=tuple(features),
        )

    def __len__(self) -> int:
        return len(self.rows.tables)

    def spec(self, config: Config, world_size: int = 1) -> OracleSpec:
        """The trainer's oracle request: window, policy and cache are those of the configuration (auto: none).

        A replay plans for given sizes (`at_setting`).
        """
        return OracleSpec(
            table_rows=tuple(table.rows for table in self.rows.tables),
            features=self.features,
            num_slots=0 if config.cache.rows == "auto" else config.cache.rows,
            lookahead=config.oracle.lookahead,
            policy=config.oracle.policy,
            horizon=config.oracle.horizon,
            world_size=world_size,
            assign=config.cacher.assign,
        )

    @property
    def row_bytes(self) -> NDArray[np.int64]:
        """int64 by table: bytes of a stored row, weights and optimizer state."""
        return np.array([self.rows.row_bytes(number) for number in range(len(self))], dtype=np.int64)

    @property
    def row_bytes_by_name(self) -> dict[str, int]:
        """`row_bytes` by the name of the table. Tables of the data have theirs; a model's gates have more."""
        return {table.name: self.rows.row_bytes(number) for number, table in enumerate(self.rows.tables)}

    @property
    def weight_bytes(self) -> NDArray[np.int64]:
        """int64 by table: bytes of a row's weights, as sent between ranks."""
        sizes = [self.rows.row_type_of(number).word_bytes for number in range(len(self))]
        return self._dims * np.array(sizes, dtype=np.int64)

    @property
    def gradient_bytes(self) -> NDArray[np.int64]:
        """int64 by table: bytes of a row's gradient, which stays in the compute dtype."""
        return self._dims * ROW_TYPES[self.rows.row_type.compute].word_bytes

    @property
    def _dims(self) -> NDArray[np.int64]:
        return np.array([table.dim for table in self.rows.tables], dtype=np.int64)


def at_setting(config: Config, *, policy: str, lookahead: int, cache_rows: int) -> Config:
    """The configuration with one setting of the sweep."""
    sees_log = policy == LOG_POLICY
    return dataclasses.replace(
        config,
        oracle=dataclasses.replace(
            config.oracle,
            policy="belady-window" if sees_log else cast(Policy, policy),
            lookahead=lookahead,
            horizon="log" if sees_log else "window",
        ),
        cache=dataclasses.replace(config.cache, rows=cache_rows),
    )
