"""`open_source`: what `checkpoint.start_from` names, by the kind of its files.

a folder with generation-… folders  ──> a checkpoint: the newest, or @step, @best
a folder with .metadata             ──> torch.distributed.checkpoint
*.safetensors, a folder of them     ──> safetensors
*.pt, *.pth, *.bin, *.ckpt          ──> refused: a pickle
"""

from __future__ import annotations

import re
from pathlib import Path

from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.errors import InputError
from bagpipe.start_from.checkpoint_source import CheckpointSource
from bagpipe.start_from.dcp_files import DcpFiles
from bagpipe.start_from.safetensor_files import SafetensorFiles
from bagpipe.start_from.source import Source
from bagpipe.start_from.tensor_source import TensorSource
from bagpipe.util.program import note

__all__ = ["open_source"]

_AT = re.compile(r"(.+)@(best|\d+)")
#: Names of files that torch.save writes, by custom.
_PICKLES = (".pt", ".pth", ".bin", ".ckpt")


def open_source(where: str) -> Source:
    """Open what a text names.

    Raises:
        InputError: there is no such file or folder, its kind is not known, or it cannot be read.
    """
    found = _AT.fullmatch(where)
    path, chosen = (Path(found[1]), found[2]) if found and not Path(where).exists() else (Path(where), "auto")
    if not path.exists():
        raise InputError(f"checkpoint.start_from {where}: there is no {path}")
    if path.is_file() and path.suffix in _PICKLES:
        raise InputError(_pickle_problem(path))
    is_checkpoints = path.is_dir() and any(path.glob("generation-*"))
    if not is_checkpoints and chosen != "auto":
        raise InputError(f"checkpoint.start_from {where}: @{chosen} needs a folder of checkpoints, {path} is none")
    if is_checkpoints:
        return _checkpoint(path, chosen)
    if (path / ".metadata").is_file():
        return TensorSource(DcpFiles(path), f"the torch.distributed.checkpoint {path}")
    # The export of a checkpoint has optimizer state in a file of its own.
    files = [path] if path.is_file() else sorted(set(path.glob("*.safetensors")) - {path / "optimizer.safetensors"})
    if files and all(file.suffix == ".safetensors" for file in files):
        return TensorSource(SafetensorFiles(files), f"the tensors of {path}")
    raise InputError(
        f"checkpoint.start_from {where}: expected a folder of checkpoints, a folder of torch.distributed.checkpoint, "
        "or safetensors files"
    )


def _checkpoint(path: Path, chosen: str) -> CheckpointSource:
    try:
        checkpoint = CheckpointFolder(path).chosen(chosen, note)
    except InputError as error:
        raise InputError(f"checkpoint.start_from{str(error).removeprefix('checkpoint.dir')}") from None
    if checkpoint is None or not checkpoint.manifest.parts:
        raise InputError(f"checkpoint.start_from {path} has no checkpoint of trained weights")
    return CheckpointSource(checkpoint, f"the checkpoint of step {checkpoint.manifest.step} in {path}")


def _pickle_problem(path: Path) -> str:
    convert = (
        "import torch, safetensors.torch; safetensors.torch.save_file("
        f"{{k: v.contiguous() for k, v in torch.load({str(path)!r}, weights_only=True).items()}}, "
        f"{str(path.with_suffix('.safetensors'))!r})"
    )
    return (
        f"checkpoint.start_from {path} is a file of torch.save, which is a pickle and is not read: convert its state "
        f'dict with python -c "{convert}"'
    )
