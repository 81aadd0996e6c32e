"""`python -m trainer export`: export a checkpoint's model for serving or for training in other programs.

checkpoint.dir ──newest whole, best, or --step──> settings ──build_model──> names ──bagpipe.checkpoint.export──> --out
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from bagpipe.checkpoint.export import FORMATS, ExportTable, collect, write
from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.config.sections import ModelConfig
from bagpipe.errors import EXIT_DONE, InputError
from bagpipe.models.torchrec_models import build_model
from bagpipe.types.schema import DataSchema, RowSchema
from bagpipe.util.programs import command_of

__all__ = ["export", "names_in"]

_GIB = 1 << 30


def export(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit code.

    Raises:
        InputError: a flag is wrong, there is no checkpoint, the checkpoint is too large, or the folder cannot be
            written.
    """
    options = _parse(argv)
    folder = CheckpointFolder(Path(options.checkpoint_dir))
    checkpoint = folder.chosen(options.step, _warn)
    if checkpoint is None:
        raise InputError(f"checkpoint.dir {options.checkpoint_dir} has no checkpoint")
    tables, dense = names_in(checkpoint)
    exported = collect(checkpoint, tables, dense, max_bytes=int(options.max_gib * _GIB))
    manifest = checkpoint.manifest
    out = Path(options.out)
    write(exported, out, options.format, metadata={"step": str(manifest.step), "lineage": manifest.lineage})
    num_bytes = sum(tensor.nbytes for tensor in exported.weights.values())
    sys.stdout.write(
        f"step {manifest.step}: {len(exported.weights)} tensors, {num_bytes / 1e6:.1f} MB of weights in {out}\n"
    )
    return EXIT_DONE


def names_in(checkpoint: Checkpoint) -> tuple[list[ExportTable], list[str]]:
    """Names of the tables and dense weights in the checkpoint's model. Builds the model to find them.

    Raises:
        InputError: the model cannot be built from the checkpoint's settings.
    """
    settings = checkpoint.manifest.settings
    model = build_model(_data_schema(settings), _model_config(settings))
    bounds = {table.name: table.rows for table in RowSchema.from_json(checkpoint.manifest.row_schema).tables}
    tables: list[ExportTable] = []
    prefixes: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection):
            inner, configs = "embedding_bags", module.embedding_bag_configs()
        elif isinstance(module, EmbeddingCollection):
            inner, configs = "embeddings", module.embedding_configs()
        else:
            continue
        path = f"{name}." if name else ""
        prefixes.append(path)
        for config in configs:
            num_rows = None if bounds.get(config.name) is None else config.num_embeddings
            tables.append(ExportTable(name=f"{path}{inner}.{config.name}", table=config.name, num_rows=num_rows))
    dense = [name for name in model.state_dict() if not name.startswith(tuple(prefixes))]
    return tables, dense


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (--help lists the options)")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog=command_of("export"), allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint.dir", dest="checkpoint_dir", metavar="DIR", required=True)
    parser.add_argument(
        "--step", type=_step, metavar="N|best", default="auto", help="step of the checkpoint (default: the newest)"
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="a new folder")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0])
    parser.add_argument(
        "--max-gib", type=float, default=16.0, metavar="G", help="largest size of all tables (default: 16)"
    )
    return parser.parse_args(list(argv))


def _step(text: str) -> str:
    """A step, or best: a value of `checkpoint.resume`."""
    if text not in ("auto", "best") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a step number or best, got {text!r}")
    return text


def _data_schema(settings: Mapping[str, Any]) -> DataSchema:
    return DataSchema.from_json(settings["data columns"])


def _model_config(settings: Mapping[str, Any]) -> ModelConfig:
    values: dict[str, Any] = {
        key.removeprefix("model."): tuple(value) if isinstance(value, list) else value
        for key, value in settings.items()
        if key.startswith("model.")
    }
    return ModelConfig(**values)


def _warn(text: str) -> None:
    sys.stderr.write(f"note: {text}\n")
