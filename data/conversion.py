"""Converts data into a folder of columnar parts, in several processes; goes on where a killed conversion ended.

    inputs ──segments, in order──> Part: at most so many segments of one file ──ProcessPool──> part-00000.parquet, …
                                                                              └──PartRecord──> ConversionManifest

The parts and their content depend on the inputs and the options alone, never on the number of processes. Read in the
order of their names they hold the rows in the order of the inputs. A part that is finished and whole is kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bagpipe
from bagpipe.client.agreement import first_difference
from bagpipe.errors import InputError
from bagpipe.files.access import forget
from bagpipe.util.process_pool import ProcessPool
from data.clock import clock_of
from data.columnar_writer import write_columnar
from data.conversion_manifest import ConversionManifest, PartRecord, record_of
from data.source import Segment, Source, version_of

__all__ = ["Conversion", "Watch", "checked_inputs", "convert_folder", "manifest_of", "parts_of"]

#: Shows the progress: takes the records as they come, and the number of parts.
Watch = Callable[[Iterable[PartRecord], int], Iterable[PartRecord]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What is converted, and into what.

    Attributes:
        sources: at least one, all with the same columns.
        folder: of the parts.
        form: arrow or parquet.
        schema_path: of the inputs' schema TOML; empty: none.
        limit: raw rows, the first of all; 0: all.
        part_segments: most segments in a part.
        jobs: processes.
        redo: convert anew if the folder holds another conversion.
    """

    sources: tuple[Source, ...]
    folder: Path
    form: str = "parquet"
    schema_path: str = ""
    limit: int = 0
    part_segments: int = 64
    jobs: int = 1
    redo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A file to write: the first `limit` raw rows (0: all) of consecutive segments of one input file."""

    name: str
    source: Source
    segments: tuple[Segment, ...]
    limit: int = 0


def convert_folder(conversion: Conversion, watch: Watch) -> tuple[PartRecord, ...]:
    """Write all parts; returns their records in order.

    Raises:
        InputError: bad input rows under the stop policy; sources with different columns; an input that changes
            meanwhile; a folder that holds another conversion or other files.
        JobError: no room on the disk, or a process ended.
    """
    inputs = checked_inputs(conversion.sources)
    parts = tuple(parts_of(conversion))
    found: dict[str, PartRecord] = {}
    with manifest_of(conversion, inputs, {}) as manifest:
        works = [(part, conversion.folder, manifest.finished.get(part.name)) for part in parts]
        with ProcessPool(min(conversion.jobs, len(parts))) as pool:
            for record in watch(pool.map_unordered(_convert_part, works), len(parts)):
                found[record.part] = record
                if not record.is_kept:
                    manifest.add(record)
        for path, version in _versions(conversion.sources).items():
            if inputs[path] != version:
                raise InputError(f"{path} changed while it was converted: it was {inputs[path]}, and is {version}")
        manifest.finish([part.name for part in parts])
    return tuple(found[part.name] for part in parts)


def checked_inputs(sources: Sequence[Source]) -> dict[str, str]:
    """Input file -> its version, in order.

    Raises:
        InputError: sources with different columns, or a file is missing.
    """
    _check_columns(sources)
    return _versions(sources)


def manifest_of(conversion: Conversion, inputs: Mapping[str, str], more: Mapping[str, Any]) -> ConversionManifest:
    """The manifest of the folder. `more`: options that the parts depend on besides those of the conversion."""
    options = {**_options(conversion), **more}
    return ConversionManifest(conversion.folder, inputs=inputs, options=options, redo=conversion.redo)


def parts_of(conversion: Conversion) -> Iterator[Part]:
    """The parts in order. With a limit, counts the rows up to it."""
    left, number = conversion.limit, 0
    for source in conversion.sources:
        for run in _runs(source.segments(), conversion.part_segments):
            rows = 0
            if conversion.limit:
                if not left:
                    return
                rows = min(left, sum(source.count_rows(segment, left) for segment in run))
                left -= rows
            name = f"part-{number:05}.{conversion.form}"
            yield Part(name=name, source=source, segments=run, limit=rows)
            number += 1


def _runs(segments: Sequence[Segment], most: int) -> Iterator[tuple[Segment, ...]]:
    """Consecutive segments of one file, at most so many."""
    run: list[Segment] = []
    for segment in segments:
        if run and (len(run) == most or segment.file != run[0].file):
            yield tuple(run)
            run = []
        run.append(segment)
    if run:
        yield tuple(run)


def _convert_part(work: tuple[Part, Path, PartRecord | None]) -> PartRecord:
    """Write one part, unless it is there."""
    part, folder, known = work
    path = folder / part.name
    if known is not None and known.is_at(path):
        return dataclasses.replace(known, is_kept=True)
    written = write_columnar(part.source, str(path), part.limit, part.segments)
    return record_of(path, rows=written.rows, skipped=written.skipped)


def _check_columns(sources: Sequence[Source]) -> None:
    first = json.loads(json.dumps(sources[0].schema.to_json()))
    for source in sources[1:]:
        change = first_difference(first, json.loads(json.dumps(source.schema.to_json())))
        if change is not None:
            raise InputError(
                f"{source.files[0]}: expected the columns of {sources[0].files[0]}, where {change.path} is "
                f"{change.first}, got {change.second}"
            )


def _versions(sources: Sequence[Source]) -> dict[str, str]:
    """Input file -> its version, in order."""
    found = {}
    for path in (path for source in sources for path in source.files):
        forget(path)
        found[path] = str(version_of(path))
    return found


def _options(conversion: Conversion) -> dict[str, Any]:
    """All that the parts depend on besides the inputs."""
    source = conversion.sources[0]
    schema = Path(conversion.schema_path).read_bytes() if conversion.schema_path else b""
    clock = clock_of(source)
    times = {} if clock is None else {"times": clock.name}  # manifests without times have no such key
    return {
        **times,
        "release": bagpipe.__version__,
        "format": source.layout,
        "columns": hashlib.sha256(json.dumps(source.schema.to_json(), sort_keys=True).encode()).hexdigest()[:16],
        "schema": hashlib.sha256(schema).hexdigest()[:16] if schema else "",
        "form": conversion.form,
        "bad rows": source.bad_rows,
        "limit": conversion.limit,
        "segments of a part": conversion.part_segments,
    }
