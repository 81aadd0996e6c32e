"""Folders that `Dataset.save_to_disk` of Hugging Face's `datasets` wrote; the package itself is not needed.

    state.json ──names of the files, in order──> data-00000-of-00002.arrow, …: Arrow streams ──data.parquet──> Columns

`DatasetDict.save_to_disk` writes a folder of such folders, one for each split; `data.path` names one of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bagpipe.errors import InputError
from bagpipe.files.access import is_remote
from bagpipe.util.documents import parse_json
from data.parquet import ParquetSource

__all__ = ["dataset_files", "open_dataset"]

STATE = "state.json"
SPLITS = "dataset_dict.json"


def open_dataset(path: str, **options: Any) -> ParquetSource:
    """The source of a folder.

    Args:
        path: the folder.
        options: of `ParquetSource.of`.

    Raises:
        InputError: see `dataset_files` and `ParquetSource.of`.
    """
    return ParquetSource.of(dataset_files(path), form="huggingface", **options)


def dataset_files(path: str) -> tuple[str, ...]:
    """The data files of a folder, in order.

    Raises:
        InputError: no such folder, not of this layout, with several splits, or with an order of rows of its own.
    """
    if not path:
        raise InputError("data.path is empty: name a folder that Dataset.save_to_disk wrote")
    if is_remote(path):
        raise InputError(
            f"data.path {path}: datasets of Dataset.save_to_disk are read from local folders: copy the folder"
        )
    root = Path(path)
    if not root.exists():
        raise InputError(f"data.path {path}: no such file or folder")
    if (root / SPLITS).is_file():
        names = _read(root / SPLITS).get("splits", [])
        raise InputError(
            f"{path}: expected the folder of one split, got a folder of splits: name one of "
            f"{', '.join(str(root / str(name)) for name in names)}"
        )
    if not (root / STATE).is_file():
        raise InputError(f"{path}: expected a folder with {STATE}, as Dataset.save_to_disk writes it, got none")
    state = _read(root / STATE)
    if state.get("_indices_data_files"):
        raise InputError(
            f"{path}: the rows are in an order of their own (_indices_data_files), written by an old version: "
            f"save it again with Dataset.flatten_indices().save_to_disk"
        )
    try:
        found = tuple(str(root / item["filename"]) for item in state["_data_files"])
    except (KeyError, TypeError):
        raise InputError(f"{root / STATE}: expected _data_files, a list of objects with filename") from None
    if not found:
        raise InputError(f"{root / STATE}: the dataset has no data files")
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path}: not a JSON file: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
