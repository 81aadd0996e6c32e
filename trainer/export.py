"""`python -m trainer export` and `apply`: a checkpoint's model for serving, or for training in other programs.

checkpoint.dir ──newest whole, best, or --step──> checkpoint ──source_of──┬──write_export──> --out
                                    --since: a step or an export, the base┴──write_delta───> --out
base, delta ──apply_delta──> the full export
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, get_args

from bagpipe.checkpoint.export import FORMATS, collect, write_dcp
from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.errors import EXIT_DONE, InputError
from bagpipe.serving.apply import apply_delta
from bagpipe.serving.delta import Base, FolderBase, SourceBase, write_delta
from bagpipe.serving.export_folder import write_export
from bagpipe.serving.manifest import MODEL_FILE, ExportManifest, Precision
from bagpipe.types.schema import RowSchema
from bagpipe.util.outputs import new_folder
from bagpipe.util.printing import print_text
from bagpipe.util.program import note
from bagpipe.util.programs import command_of
from bagpipe.util.temporary_folder import temporary_folder
from trainer.export_source import SourceOptions, built_model, names_of, source_of

__all__ = ["apply", "export"]

_GIB = 1 << 30


def export(argv: Sequence[str]) -> int:
    """Run ``python -m trainer export``. Returns the exit code.

    Raises:
        InputError: a flag is wrong, there is no checkpoint, a table is too large, the base of a delta is another
            job's, or the folder cannot be written.
    """
    options = _parse(argv)
    checkpoint = _chosen(options.checkpoint_dir, options.step)
    if options.format == "dcp":
        return _export_dcp(checkpoint, options)
    with temporary_folder("export") as work, new_folder(Path(options.out), "--out") as folder:
        text = _write(checkpoint, options, work, folder)
    print_text(f"{text} in {options.out}")
    return EXIT_DONE


def apply(argv: Sequence[str]) -> int:
    """Run ``python -m trainer apply``. Returns the exit code.

    Raises:
        InputError: the base is not that of the delta, a folder is damaged, or OUT cannot be written.
    """
    parser = _Parser(prog=command_of("apply"), allow_abbrev=False, description="Apply a delta to an export.")
    parser.add_argument("base", metavar="BASE", type=Path, help="the export that the delta was made from")
    parser.add_argument("delta", metavar="DELTA", type=Path, help="folder of `export --since`")
    parser.add_argument("out", metavar="OUT", type=Path, help="a new folder: the full export")
    options = parser.parse_args(list(argv))
    manifest = apply_delta(options.base, options.delta, options.out)
    print_text(f"{_summary(manifest)} in {options.out}")
    return EXIT_DONE


def _write(checkpoint: Checkpoint, options: argparse.Namespace, work: Path, folder: Path) -> str:
    """Write an export or a delta. Returns what was written, in words."""
    earlier = None if options.since is None or _is_step(options.since) else FolderBase(Path(options.since))
    source_options = _source_options(options, None if earlier is None else earlier.manifest)
    source = source_of(checkpoint, source_options, work, on_note=note)
    if options.since is None:
        return _summary(write_export(source, folder))
    base: Base
    if earlier is not None:
        base = earlier
    else:
        before = _chosen(options.checkpoint_dir, options.since)
        base = SourceBase(source_of(before, replace(source_options, with_program=False), work, on_note=note))
    delta = write_delta(source, base, folder)
    size = delta.file.num_bytes / 1e6
    deleted = f"{sum(delta.num_deleted.values())} deleted, " if delta.num_deleted else ""
    return (
        f"step {delta.manifest.step}: {sum(delta.num_rows.values())} rows changed since step {delta.base_step}, "
        f"{deleted}{size:.1f} MB"
    )


def _export_dcp(checkpoint: Checkpoint, options: argparse.Namespace) -> int:
    given = [flag for flag in ("rows", "precision", "since") if getattr(options, flag) is not None]
    given += [flag for flag in ("weights_only", "averages") if getattr(options, flag)]
    if given:
        raise InputError(f"--{given[0].replace('_', '-')} needs --format safetensors, got dcp")
    model, _ = built_model(checkpoint)
    tables, dense = names_of(model, RowSchema.from_json(checkpoint.manifest.row_schema))
    exported = collect(checkpoint, tables, dense, max_bytes=int(options.max_gib * _GIB))
    write_dcp(exported, Path(options.out))
    num_bytes = sum(tensor.nbytes for tensor in exported.weights.values())
    print_text(
        f"step {checkpoint.manifest.step}: {len(exported.weights)} tensors, {num_bytes / 1e6:.1f} MB of weights in "
        f"{options.out}"
    )
    return EXIT_DONE


def _chosen(folder: str, step: str) -> Checkpoint:
    checkpoint = CheckpointFolder(Path(folder)).chosen(step, note)
    if checkpoint is None:
        raise InputError(f"checkpoint.dir {folder} has no checkpoint")
    return checkpoint


def _source_options(options: argparse.Namespace, base: ExportManifest | None) -> SourceOptions:
    """The options of the flags. A delta from an export has those of the export, unless flags say otherwise."""
    if options.rows == "store" and (options.precision or options.since):
        flag = "since" if options.since else "precision"
        raise InputError(f"--{flag} is about rows in files, and --rows is store")
    precision: Precision = options.precision or ("exact" if base is None else base.precision)
    return SourceOptions(
        with_rows=options.rows != "store",
        precision=precision,
        with_states=not options.weights_only if base is None else base.has_states and not options.weights_only,
        averages=options.averages,
        max_bytes=int(options.max_gib * _GIB),
    )


def _summary(manifest: ExportManifest) -> str:
    file = manifest.files[MODEL_FILE]
    return f"step {manifest.step}: {len(file.tensors)} tensors, {file.num_bytes / 1e6:.1f} MB of weights"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (--help lists the options)")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog=command_of("export"), allow_abbrev=False, description="Export the model of a checkpoint.")
    parser.add_argument("--checkpoint.dir", dest="checkpoint_dir", metavar="DIR", required=True)
    parser.add_argument(
        "--step", type=_step, metavar="N|best", default="auto", help="step of the checkpoint (default: the newest)"
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="a new folder")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0])
    parser.add_argument(
        "--rows", choices=("files", "store"), help="write the rows (default), or leave them in the store"
    )
    parser.add_argument(
        "--precision", choices=get_args(Precision), help="of the rows: that of the table (default), fp16, or int8"
    )
    parser.add_argument("--weights-only", action="store_true", help="leave out optimizer states")
    parser.add_argument("--averages", action="store_true", help="dense weights are their moving averages")
    parser.add_argument(
        "--since", metavar="STEP|DIR", help="write what changed since a checkpoint, or since an earlier export"
    )
    parser.add_argument(
        "--max-gib", type=float, default=16.0, metavar="G", help="largest size of a table in memory (default: 16)"
    )
    return parser.parse_args(list(argv))


def _step(text: str) -> str:
    """A step, or best: a value of `checkpoint.resume`."""
    if text != "auto" and not _is_step(text):
        raise argparse.ArgumentTypeError(f"expected a step number or best, got {text!r}")
    return text


def _is_step(text: str) -> bool:
    return text == "best" or text.isdecimal()
