"""Data schemas for trainer tests."""

from __future__ import annotations

from bagpipe.types.schema import DataSchema, Feature, Table


def schema_of(*dims: int | None, dense: int = 2, weighted: bool = False) -> DataSchema:
    return DataSchema(
        label="y",
        dense=tuple(f"d{n}" for n in range(dense)),
        features=tuple(Feature(name=f"f{n}", table=f"t{n}", weighted=weighted) for n in range(len(dims))),
        tables=tuple(Table(name=f"t{n}", dim=dim, rows=10) for n, dim in enumerate(dims)),
    )
