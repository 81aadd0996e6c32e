"""The table of data formats: each name in the configuration and its opener. Readers are imported on demand."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from bagpipe.client.agreement import first_difference
from bagpipe.config.data_format import with_format
from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from bagpipe.files.access import forget
from bagpipe.types.schema import DataSchema
from bagpipe.util.programs import command_of
from data.clock import with_times
from data.source import Source, check_bad_rows

__all__ = ["FORMATS", "check_test_source", "open_eval_source", "open_source"]

_LOG = logging.getLogger("bagpipe.data")


def _fixed_schema(config: DataConfig, schema: DataSchema, *sections: str) -> tuple[DataSchema, Mapping[str, Any]]:
    """The schema of a format with fixed columns after the overrides of the schema file, and the content of that file.

    Raises:
        InputError: the file holds more than tables and the `sections` of the format.
    """
    from data.schema_file import override_tables, read_schema_file

    if not config.schema:
        return schema, {}
    value = read_schema_file(config.schema)
    allowed = ("table_defaults", "tables", *sections)
    for key in value:
        if key not in allowed:
            raise InputError(
                f"{config.schema}: the columns of {config.format} are fixed: expected only {', '.join(allowed)}, "
                f"got {key}"
            )
    return override_tables(config.schema, value, schema), value


def _open_avazu(config: DataConfig, seed: int) -> Source:
    from data.avazu import AvazuSource, avazu_schema

    schema, _ = _fixed_schema(config, avazu_schema())
    return AvazuSource.at(config.path, schema=schema, bad_rows=config.bad_rows)


def _open_criteo(config: DataConfig, seed: int) -> Source:
    from data.criteo import CriteoSource
    from data.schema_file import criteo_schema

    schema, _ = _fixed_schema(config, criteo_schema())
    return CriteoSource.at(config.path, schema=schema, bad_rows=config.bad_rows)


def _open_csv(config: DataConfig, seed: int) -> Source:
    from data.csv import CsvSource

    return CsvSource.at(config.path, schema_path=config.schema, bad_rows=config.bad_rows, unlabelled=config.unlabelled)


def _open_huggingface(config: DataConfig, seed: int) -> Source:
    from data.huggingface import open_dataset

    return open_dataset(config.path, schema_path=config.schema, bad_rows=config.bad_rows, unlabelled=config.unlabelled)


def _open_mlperf(config: DataConfig, seed: int) -> Source:
    from data.mlperf import MlperfSource

    source = MlperfSource.at(config.path, bad_rows=config.bad_rows)
    schema, _ = _fixed_schema(config, source.schema)
    return dataclasses.replace(source, schema=schema)


def _open_movielens(config: DataConfig, seed: int) -> Source:
    from data.movielens import MovieLensSource, find_genres, movielens_schema
    from data.schema_file import check_keys

    genres = find_genres(config.path)
    schema, value = _fixed_schema(config, movielens_schema(genres is not None), "movielens")
    section = value.get("movielens", {})
    check_keys(f"{config.schema}: movielens", section, {"positive_rating": float})
    return MovieLensSource.at(config.path, genres=genres, schema=schema, bad_rows=config.bad_rows, **section)


def _open_parquet(config: DataConfig, seed: int) -> Source:
    from data.parquet import ParquetSource

    return ParquetSource.at(
        config.path, schema_path=config.schema, bad_rows=config.bad_rows, unlabelled=config.unlabelled
    )


def _open_synthetic(config: DataConfig, seed: int) -> Source:
    from data.synthetic import SyntheticSource
    from data.synthetic_options import options_at

    return SyntheticSource.of(options_at(config.schema), seed)


def _open_tfrecord(config: DataConfig, seed: int) -> Source:
    from data.tfrecord import TfRecordSource

    return TfRecordSource.at(
        config.path, schema_path=config.schema, bad_rows=config.bad_rows, unlabelled=config.unlabelled
    )


#: Format name -> opener(config, seed). A new reader is one entry here.
FORMATS: Mapping[str, Callable[[DataConfig, int], Source]] = {
    "avazu-csv": _open_avazu,
    "criteo-tsv": _open_criteo,
    "csv": _open_csv,
    "huggingface": _open_huggingface,
    "mlperf-npz": _open_mlperf,
    "movielens": _open_movielens,
    "parquet": _open_parquet,
    "synthetic": _open_synthetic,
    "tfrecord": _open_tfrecord,
}


def open_source(
    config: DataConfig, seed: int = 0, *, needs_dictionaries: bool = True, wants_times: bool = False
) -> Source:
    """The configured source.

    Args:
        config: the `data` section. A path without a format: the format is told from its content.
        seed: of synthetic data.
        needs_dictionaries: the dictionaries of strings that the schema names must exist.
        wants_times: read the times of the examples (`Batch.times_s`), also if no row expires by them.

    Raises:
        InputError: unknown format, missing file, or an unusable schema; times are wanted and the data has none.
    """
    opener = FORMATS.get(config.format)
    if opener is None:
        raise InputError(f"data.format must be one of {', '.join(FORMATS)}, got {config.format!r}")
    check_bad_rows(config.bad_rows)
    forget(config.path)
    if config.format == "synthetic" and config.path:
        config = with_format(config)
        if config.format == "synthetic":
            raise InputError(f"data.path {config.path}: no such file or folder")
        opener = FORMATS[config.format]
    if config.is_topic:
        source: Source = _open_topic(config)
    else:
        source = _open_folder(config, seed, opener) if config.is_stream else opener(config, seed)
    if wants_times or (config.expires and config.expire_unit == "days" and not config.scored):
        source = with_times(source, config.format)
    if needs_dictionaries:
        rules = getattr(source, "rules", None)  # of the formats with strings
        for path in () if rules is None else rules.dictionaries:
            if not os.path.isfile(path):
                raise InputError(
                    f"{path}: no such dictionary: `{command_of('data')} convert … --dictionaries frequency` builds it"
                )
    return source


def _open_folder(config: DataConfig, seed: int, opener: Callable[[DataConfig, int], Source]) -> Source:
    from data.followed_folder import FollowedFolder
    from data.parquet import SUFFIXES

    suffixes = SUFFIXES if config.format == "parquet" else ()
    return FollowedFolder.at(config, seed, opener, suffixes)


def _open_topic(config: DataConfig) -> Source:
    from data.criteo import CriteoSource
    from data.csv import CsvSource
    from data.kafka_topic import KafkaTopic
    from data.schema_file import criteo_schema

    if config.format == "csv":
        return KafkaTopic.at(config, CsvSource.of_lines(schema_path=config.schema, bad_rows=config.bad_rows))
    schema, _ = _fixed_schema(config, criteo_schema())
    return KafkaTopic.at(config, CriteoSource(files=(), schema=schema, bad_rows=config.bad_rows))


def open_eval_source(config: DataConfig, source: Source, seed: int = 0) -> Source | None:
    """The source of the files that are only for evaluation; None: there are none.

    Args:
        config: the `data` section.
        source: of the training files.
        seed: of synthetic data.

    Raises:
        InputError: files are missing or unreadable, or have other columns than the training files.
    """
    return _open_beside(config, source, "eval_path", seed)


def check_test_source(config: DataConfig, source: Source, seed: int = 0) -> None:
    """Check the files of `data.test_path`, which are read after training, before it begins.

    Raises:
        InputError: as `open_eval_source`.
    """
    _open_beside(config, source, "test_path", seed)


def _open_beside(config: DataConfig, source: Source, key: str, seed: int) -> Source | None:
    """The source of other files with the columns of the training files; None: the key names none."""
    path: str = getattr(config, key)
    if not path:
        return None
    form = with_format(config).format
    scored = dataclasses.replace(config, path=path, format=form, follow="off", scored=True)
    found = open_source(scored, seed)
    ours, theirs = (json.loads(json.dumps(item.schema.to_json())) for item in (source, found))
    change = first_difference(ours, theirs)
    if change is not None:
        raise InputError(
            f"data.{key} {path}: expected the columns of data.path, where {change.path} is "
            f"{change.first}, got {change.second}"
        )
    found.segments()  # the columns of all files, before training begins
    shared = [name for name in _data_files(found) if name in set(_data_files(source))]
    if shared and path != config.path:
        more = f" and {len(shared) - 1:,} more of its files" if len(shared) > 1 else ""
        _LOG.warning("data.%s %s: %s%s are trained on too: data.path holds them", key, path, shared[0], more)
    return found


def _data_files(source: Source) -> list[str]:
    """The files of a source, without dictionaries of strings."""
    rules = getattr(source, "rules", None)
    return [name for name in source.files if rules is None or name not in rules.dictionaries]
