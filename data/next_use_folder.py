"""Converts data into a folder of annotated parts: `python -m data convert … FOLDER --next-use`.

    inputs ──convert_folder, processes──> FOLDER/_plain/part-00000.arrow, …
           ──annotate, threads──────────> FOLDER/part-00000.parquet, …      their marks: one run, and their place in it

The parts depend on the inputs, the options and the order alone. A killed conversion goes on: parts that are finished
and whole are kept, plain and annotated ones; the sort between them begins again, because its files are gone with it. At
the end the plain parts are removed.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from data.arrow_files import open_arrow
from data.conversion import Conversion, Watch, checked_inputs, convert_folder, manifest_of
from data.conversion_manifest import PLAIN, ConversionManifest, PartRecord, record_of
from data.next_use_mark import NextUseMark
from data.next_use_writer import NextUseOrder, annotate, check_memory, run_of

__all__ = ["convert_annotated"]

#: What a process that converts takes, and what this program takes beside it.
PROCESS_BYTES, WAITING_BYTES = 256 << 20, 128 << 20


def convert_annotated(
    conversion: Conversion, order: NextUseOrder, watch: Watch, watch_annotated: Watch
) -> tuple[PartRecord, ...]:
    """Write all parts with their next uses; returns their records in order.

    Args:
        conversion: as of `convert_folder`. Its processes are as many as `order.memory_bytes` allows.
        order: of training.
        watch: shows the progress of the plain parts.
        watch_annotated: that of the annotated ones.

    Raises:
        InputError: as `convert_folder` and `annotate`.
        JobError: as `convert_folder`.
    """
    check_memory(order)
    inputs = checked_inputs(conversion.sources)
    plain = dataclasses.replace(
        conversion,
        folder=conversion.folder / PLAIN,
        form="arrow",
        jobs=max(1, min(conversion.jobs, (order.memory_bytes - WAITING_BYTES) // PROCESS_BYTES)),
    )
    options = {"next uses": [str(order.eval_fraction), order.seed, order.epochs]}
    with manifest_of(conversion, inputs, options) as manifest:
        records = _kept(conversion, manifest)
        if records is None:
            records = tuple(_written(conversion, convert_folder(plain, watch), order, manifest, watch_annotated))
        manifest.finish([record.part for record in records])
    shutil.rmtree(plain.folder, ignore_errors=True)
    return records


def _kept(conversion: Conversion, manifest: ConversionManifest) -> tuple[PartRecord, ...] | None:
    """The records of an earlier conversion that has finished all parts; None: there is none, or parts are damaged."""
    records = [dataclasses.replace(record, is_kept=True) for record in manifest.finished.values()]
    if manifest.num_finished != len(records) or not all(
        record.is_at(conversion.folder / record.part) for record in records
    ):
        return None
    return tuple(records)


def _written(
    conversion: Conversion,
    plain: Sequence[PartRecord],
    order: NextUseOrder,
    manifest: ConversionManifest,
    watch: Watch,
) -> Iterator[PartRecord]:
    """The records of the annotated parts, in order, when all are written."""
    run = run_of(plain, order)
    paths = [(conversion.folder / record.part).with_suffix(f".{conversion.form}") for record in plain]
    known = [manifest.finished.get(path.name) for path in paths]
    missing = [
        number
        for number, (path, record) in enumerate(zip(paths, known, strict=True))
        if record is None or not record.is_at(path) or not _is_of(path, run)
    ]

    def written() -> Iterator[PartRecord]:
        sources = [str(conversion.folder / PLAIN / record.part) for record in plain]
        for number in annotate(sources, {number: str(paths[number]) for number in missing}, order, run):
            yield record_of(paths[number], rows=plain[number].rows, skipped=plain[number].skipped)

    if missing:
        for record in watch(written(), len(missing)):
            manifest.add(record)
    is_new = {paths[number].name for number in missing}
    for path in paths:
        yield dataclasses.replace(manifest.finished[path.name], is_kept=path.name not in is_new)


def _is_of(path: Path, run: str) -> bool:
    """Whether a whole part is of this run: another release of a library can write other plain parts."""
    mark = NextUseMark.of(str(path), open_arrow(str(path)).schema.metadata)
    return mark is not None and mark.run == run
