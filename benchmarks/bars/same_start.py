"""Initial values and batches of a job of ours, in the form that FuxiCTR's models take.

    configuration ──build_training_model──> dense values ─┬─ names of FuxiCTR ──> initial.npz
                    initial_weights of every row ─────────┘
                  ──loader, every epoch──> examples in the order of training ──> batches.npz

FuxiCTR's model then computes what ours computed, up to rounding, if both systems do the same. Rounding must be that of
float64. The bias of a layer before batch norm has a gradient of zero plus rounding, and Adam and Adagrad divide it by
its own size: in float32 such biases walk at random, and scores of two exact implementations drift apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.config.load import parse_config
from bagpipe.config.sections import Config
from bagpipe.kernels.initialization import initial_weights
from benchmarks.bars.prepare import LABEL
from data.formats import open_source
from data.loader import open_loader
from trainer.assembly import BuiltModel, build_training_model

__all__ = ["JobOfOurs"]

_EMBEDDINGS = "embedding_layer.embedding_layer.embedding_layers"
#: Names of our dense parameters, and FuxiCTR's.
_NAMES: Mapping[str, Mapping[str, str]] = {
    "DCNv2": {
        r"cross\.layers\.": "crossnet.cross_layers.",
        r"deep\.": "parallel_dnn.mlp.",
        r"head\.": "fc.",
    },
    "DeepFM": {r"deep\.": "mlp.mlp.", "bias$": "fm.lr_layer.bias"},
    "FinalMLP": {
        r"streams\.0\.": "mlp1.mlp.",
        r"streams\.1\.": "mlp2.mlp.",
        r"gates\.0\.factors\.": "fs_module.fs1_gate.mlp.",
        r"gates\.1\.factors\.": "fs_module.fs2_gate.mlp.",
        r"fusion\.first\.": "fusion_module.w_x.",
        r"fusion\.second\.": "fusion_module.w_y.",
    },
}
#: Our parameters with a row for each dense column, and the FuxiCTR module that has a linear map for each of them.
_BY_COLUMN = {
    "numeric.weight": _EMBEDDINGS,
    "numeric_first.weight": f"fm.lr_layer.{_EMBEDDINGS}",
    "gates.0.numeric.weight": f"fs_module.fs1_ctx_emb.{_EMBEDDINGS.partition('.')[2]}",
}
#: Suffix of our tables, and the FuxiCTR module with one for each feature.
_GATE_TABLES = {
    "": _EMBEDDINGS,
    ".first_gate": f"fs_module.fs1_ctx_emb.{_EMBEDDINGS.partition('.')[2]}",
    ".second_gate": f"fs_module.fs2_ctx_emb.{_EMBEDDINGS.partition('.')[2]}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOfOurs:
    """A job of ours before its first step.

    Attributes:
        model: key of `benchmarks.bars.settings.MODELS`.
        config: of the job.
        built: its model.
    """

    model: str
    config: Config
    built: BuiltModel

    @classmethod
    def of(cls, model: str, flags: list[str]) -> JobOfOurs:
        """The job that the trainer makes of these flags."""
        config = parse_config(flags, "python -m trainer").config
        schema = open_source(config.data, config.run.seed).schema
        return cls(model=model, config=config, built=build_training_model(config, schema))

    @property
    def parameters(self) -> int:
        """Numbers that are trained, rows of all tables included."""
        rows = sum((table.rows or 0) * table.dim for table in self.built.converted.row_tables)
        return rows + sum(value.numel() for value in self.built.converted.model.parameters())

    def write(self, folder: Path) -> None:
        """Write initial.npz and batches.npz into an existing folder."""
        initial: dict[str, Any] = {name: value.detach().numpy() for name, value in self._initial()}
        np.savez(folder / "initial.npz", **initial)
        np.savez(folder / "batches.npz", **self._batches())

    def _initial(self) -> Iterator[tuple[str, Tensor]]:
        columns = self.built.data.dense
        for name, value in self.built.converted.model.named_parameters():
            if name in _BY_COLUMN:
                for column, vector in zip(columns, value, strict=True):
                    yield f"{_BY_COLUMN[name]}.{column}.weight", vector[:, None]
            elif name == "fusion.weight":
                yield "fusion_module.w_xy", value.reshape(-1, 1)
            else:
                yield self._name(name), value
        for table in self.built.converted.row_tables:
            assert table.rows is not None
            rows = initial_weights(table, np.arange(table.rows), seed=self.config.run.seed, dtype=self.config.run.dtype)
            feature, dot, gate = table.name.partition(".")
            if self.model == "DeepFM":  # the first weight of a row is its first-order term
                yield f"fm.lr_layer.{_EMBEDDINGS}.{feature}.weight", rows[:, :1]
                rows = rows[:, 1:]
            yield f"{_GATE_TABLES[dot + gate]}.{feature}.weight", rows

    def _name(self, name: str) -> str:
        for pattern, theirs in _NAMES[self.model].items():
            if re.match(pattern, name):
                return re.sub(f"^{pattern}", theirs, name)
        raise AssertionError(f"{self.model} has a parameter {name} that FuxiCTR's model has not")

    def _batches(self) -> dict[str, Any]:
        schema = self.built.data
        columns: dict[str, list[NDArray[np.generic]]] = {}
        sizes = []
        with open_loader(self.config.data, seed=self.config.run.seed) as loader:
            for batch in loader:
                sizes.append(batch.num_examples)
                columns.setdefault(LABEL, []).append(batch.labels.astype(np.float32))
                for name, numbers in zip(schema.dense, batch.dense.T, strict=True):
                    columns.setdefault(name, []).append(numbers)
                bounds = pairwise(batch.feature_offsets().tolist())
                for feature, (first, last) in zip(schema.features, bounds, strict=True):
                    columns.setdefault(feature.name, []).append(batch.values[first:last])
        return {"sizes": np.array(sizes), **{name: np.concatenate(parts) for name, parts in columns.items()}}
