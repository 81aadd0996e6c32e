"""Serving of exported models: `load` an export and score, `RowClient` for vectors of ids, deltas between exports.

    checkpoint ──trainer export──> folder: manifest.json, dense.pt2, model.safetensors ──load──> Scorer ──> scores
    store of a job ──live_rows──────────────────────────────────────────────────────────> RowClient ──┘
    export A, checkpoint B ──trainer export --since──> delta ──trainer apply──> the full export of B

reading    row_client over file_rows or live_rows; initial_rows: values of ids never trained; row_words: half types and
           rows of 8 bits; tensor_file: safetensors, mapped; manifest                       numpy, no torch
scoring    runner over pooling (`Bags`, `pool`) and the program                             torch, no torchrec
writing    program: the dense part for torch.export; table_tensors, export_folder: the files; delta, apply
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bagpipe.serving.pooling import Bags as Bags
    from bagpipe.serving.pooling import pool as pool
    from bagpipe.serving.row_client import RowClient as RowClient
    from bagpipe.serving.row_words import CodedRows as CodedRows
    from bagpipe.serving.runner import Scorer as Scorer
    from bagpipe.serving.runner import load as load

#: Names that are imported on first use, and their modules: reading rows needs no torch.
_ON_FIRST_USE = {
    "Bags": "bagpipe.serving.pooling",
    "CodedRows": "bagpipe.serving.row_words",
    "RowClient": "bagpipe.serving.row_client",
    "Scorer": "bagpipe.serving.runner",
    "load": "bagpipe.serving.runner",
    "pool": "bagpipe.serving.pooling",
}

__all__ = ["Bags", "CodedRows", "RowClient", "Scorer", "load", "pool"]


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return getattr(importlib.import_module(_ON_FIRST_USE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
