"""The table of data formats: a name in the configuration, and what opens it. Readers are imported when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bagpipe.config import DataConfig
from bagpipe.errors import InputError
from data.source import Source, check_bad_rows

__all__ = ["FORMATS", "open_source"]


def _open_criteo(config: DataConfig, seed: int) -> Source:
    from data.criteo import CriteoSource
    from data.schema import criteo_schema, override_tables, read_schema_file

    schema = criteo_schema()
    if config.schema:
        value = read_schema_file(config.schema)
        fixed = [key for key in ("label", "dense", "sparse", "synthetic") if key in value]
        if fixed:
            raise InputError(
                f"{config.schema}: the columns of criteo-tsv are fixed: expected only table_defaults and tables, "
                f"got {fixed[0]}"
            )
        schema = override_tables(config.schema, value, schema)
    return CriteoSource.at(config.path, schema=schema, bad_rows=config.bad_rows)


def _open_parquet(config: DataConfig, seed: int) -> Source:
    from data.parquet import ParquetSource

    return ParquetSource.at(config.path, schema_path=config.schema, bad_rows=config.bad_rows)


def _open_synthetic(config: DataConfig, seed: int) -> Source:
    from data.synthetic import SyntheticSource
    from data.synthetic_options import options_at

    options = options_at(config.schema)
    return SyntheticSource(
        schema=options.schema,
        features=options.features,
        rows=options.rows,
        seed=seed,
        label_rate=options.label_rate,
    )


#: Format name -> opener(config, seed). A new reader is one entry here.
FORMATS: Mapping[str, Callable[[DataConfig, int], Source]] = {
    "criteo-tsv": _open_criteo,
    "parquet": _open_parquet,
    "synthetic": _open_synthetic,
}


def open_source(config: DataConfig, seed: int = 0) -> Source:
    """The source a configuration names.

    Args:
        config: the `data` section.
        seed: of synthetic data.

    Raises:
        InputError: unknown format, missing file, or a schema that cannot be used.
    """
    opener = FORMATS.get(config.format)
    if opener is None:
        raise InputError(f"data.format must be one of {', '.join(FORMATS)}, got {config.format!r}")
    check_bad_rows(config.bad_rows)
    return opener(config, seed)
