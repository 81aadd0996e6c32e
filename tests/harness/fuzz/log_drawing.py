"""`draw_log`: a log that suits the settings and the model of a job. Pure.

settings, model ──format──> columns, tables ──laws, bags, bounds──> Log
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

from bagpipe.types.schema import Pooling, Table
from tests.harness.fuzz.log import BAG_LENGTHS, ID_LAWS, LABEL_LAWS, Column, Log
from tests.harness.fuzz.log_files import FIXED_COLUMNS, NAMED_COLUMNS, SHAPES, tables_of
from tests.harness.fuzz.space import Values, draw_value

__all__ = ["draw_log"]

#: Models whose tables may differ in dimension.
_RAGGED = ("wide-deep", "towers", "dcnv2-fuxictr", "finalmlp", "mmoe", "ple")

#: Columns of the models in tests.system.factory.
_MIXED = (
    Column(name="user", table="user", missing=0.1),
    Column(name="items", table="items", bag="short", weighted=True, missing=0.2),
    Column(name="queried", table="items", bag="short", missing=0.2),
    Column(name="topic", table="topic", vocabulary=9),
    Column(name="history", table="history", bag="short", missing=0.2),
)
_MIXED_TABLES = (
    Table(name="user"),
    Table(name="items"),
    Table(name="topic", rows=9, pooling="mean"),
    Table(name="history", pooling="none"),
)

_POOLINGS: tuple[Pooling, ...] = ("sum", "mean")
_FORMATS: Values = {
    "parquet": 5,
    "csv": 1,
    "huggingface": 1,
    "tfrecord": 1,
    "synthetic": 2,
    "criteo-tsv": 2,
    "avazu-csv": 1,
    "mlperf-npz": 1,
    "movielens": 2,
}
#: Batches of a job, about.
_MAX_BATCHES = 30


def draw_log(rng: Random, settings: Mapping[str, str], model: Mapping[str, str]) -> Log:
    """A log that suits a job's settings and its model."""
    factory = model.get("model.factory", "")
    is_mixed = factory.startswith("tests.system.factory")
    needs_dense = factory.startswith("tests.harness.fuzz.models")
    form = "parquet" if is_mixed or needs_dense or "sequences" in factory else draw_value(rng, _FORMATS)
    tables: tuple[Table, ...]
    if is_mixed:
        columns, tables = tuple(_with_law(rng, column) for column in _MIXED), _MIXED_TABLES
    else:
        columns = _columns(rng, form, is_weighted="sequences" not in factory)
        is_ragged = not factory and model["model.name"] in _RAGGED
        # A schema with mean pooling of weighted features is refused, and so is rarely drawn.
        weighted = {column.table for column in columns if column.weighted and rng.random() < 0.95}
        tables = tuple(_table(rng, form, table, is_ragged, table.name in weighted) for table in tables_of(columns))
    if "sequences" in factory:
        tables = (Table(name=tables[0].name, pooling="none"), *tables[1:])
    batch_size = int(settings["data.batch_size"])
    most = min(300, batch_size * _MAX_BATCHES // int(settings["data.epochs"]))
    sizes = [rng.randint(2 * batch_size, most) if most > 2 * batch_size else most, rng.randint(1, batch_size + 1)]
    whole = max(1, most // batch_size - 1) * batch_size
    sizes += [whole + 1, whole]
    return Log(
        format=form,
        shape=rng.choice(SHAPES[form]),
        seed=rng.randrange(2**32),
        num_examples=rng.choices(sizes, weights=[8, 1, 1, 1])[0],
        num_bad=rng.choices([0, 1, 5], weights=[5, 1, 1] if settings["data.bad_rows"] == "skip" else [20, 1, 0])[0],
        num_dense=3 if is_mixed else rng.randint(1 if needs_dense else 0, 3),
        columns=columns,
        tables=tables,
        labels=rng.choices(LABEL_LAWS, weights=[8, 1, 1])[0] if form in NAMED_COLUMNS else "clicks",
        extreme=rng.choice([0.0, 0.0, 0.02]) if settings["run.nonfinite"] == "skip" or rng.random() < 0.05 else 0.0,
    )


def _with_law(rng: Random, column: Column) -> Column:
    return replace(column, law=rng.choice(ID_LAWS))


def _columns(rng: Random, form: str, *, is_weighted: bool) -> tuple[Column, ...]:
    fixed = FIXED_COLUMNS.get(form)
    if fixed is not None:
        names = fixed[: rng.randint(2, 3)] if form == "movielens" else fixed
        return tuple(
            Column(
                name=name,
                table=name,
                law=rng.choice(ID_LAWS),
                vocabulary=rng.choice([3, 40]),
                missing=0.0 if form in ("mlperf-npz", "movielens") else rng.choice([0.0, 0.2, 1.0]),
            )
            for name in names
        )
    names = tuple(f"f{number}" for number in range(rng.randint(1, 5)))
    weighted = is_weighted and form in NAMED_COLUMNS and rng.random() < 0.3
    return tuple(
        Column(
            name=name,
            table=rng.choice(names[: number + 1]) if rng.random() < 0.3 else name,
            law=rng.choice(ID_LAWS),
            vocabulary=rng.choice([1, 5, 40, 300]),
            bag=rng.choice(list(BAG_LENGTHS)),
            missing=rng.choice([0.0, 0.1, 0.5, 1.0]),
            weighted=weighted and rng.random() < 0.6,
        )
        for number, name in enumerate(names)
    )


def _table(rng: Random, form: str, table: Table, is_ragged: bool, is_summed: bool) -> Table:
    """A bound, a hash, a dimension and a pooling, where the format and the model allow them."""
    is_free = table.name not in ("hour", "weekday", "genres")
    bound = rng.choice([None, None, 7, 500]) if is_free else None
    is_either = form in (*NAMED_COLUMNS, "synthetic") and not is_summed
    pooling: Pooling = rng.choice(_POOLINGS) if is_either else "sum"
    return Table(
        name=table.name,
        rows=bound,
        hash=bound is not None and (form in FIXED_COLUMNS or rng.random() < 0.5),
        dim=rng.choice([None, 2, 7]) if is_ragged and rng.random() < 0.5 else None,
        pooling="mean" if table.name == "genres" else pooling,
    )
