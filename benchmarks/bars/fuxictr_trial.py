"""One run of FuxiCTR, in an interpreter that has it: the models of its model_zoo in its own training loop.

    python fuxictr_trial.py TASK.json OUTCOME.json        the launcher owns both files; imports nothing of this project

Three things can be changed, one at a time, for the ablations:

* ``sparse_adam``: torch's SparseAdam updates the rows of a batch (``batch``) or all rows (``all``), in place of Adam
  (empty), which updates all rows.
* ``initial``: parameters come from this .npz, by their names in FuxiCTR.
* ``batches``: training batches come from this .npz, in its order, and all numbers are float64.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_FILES = {
    "DCNv2": "model_zoo/DCNv2/src/DCNv2.py",
    "DeepFM": "model_zoo/DeepFM/DeepFM_torch/src/DeepFM.py",
    "FinalMLP": "model_zoo/FinalMLP/src/FinalMLP.py",
}


class _Recorded:
    """A training step whose rows can be lazy, and a record of evaluations, mixed into a model of FuxiCTR.

    Attributes:
        task: of the run.
        history: AUC of each evaluation.
        tables: embedding weights by name, if the rows have an optimizer of their own.
    """

    task: Mapping[str, Any]
    history: list[float]
    tables: dict[str, Tensor]

    def compile(self: Any, optimizer: str, loss: str, lr: float) -> None:
        parent: Any = super()
        parent.compile(optimizer, loss, lr)
        self.history, self.tables = [], {}
        if self.task["sparse_adam"]:
            self._make_sparse(lr)

    def _make_sparse(self: Any, lr: float) -> None:
        self.tables = {name: module.weight for name, module in self.named_modules() if _is_table(module)}
        ours = {id(weight) for weight in self.tables.values()}
        self.optimizer = torch.optim.Adam([value for value in self.parameters() if id(value) not in ours], lr=lr)
        self.rows_optimizer = torch.optim.SparseAdam(self.tables.values(), lr=lr)

    def train_step(self: Any, batch: Mapping[str, Any]) -> Any:
        parent: Any = super()
        if not self.tables:
            return parent.train_step(batch)
        for weight in self.tables.values():
            weight.grad = None
        self.optimizer.zero_grad()
        loss = self.compute_loss(self.forward(batch), self.get_labels(batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters(), self._max_gradient_norm)
        for name, weight in self.tables.items():
            rows = torch.arange(len(weight))
            if self.task["sparse_adam"] == "batch":
                rows = batch[name.rpartition(".")[2]].long().unique()
            weight.grad = torch.sparse_coo_tensor(
                rows[None], weight.grad[rows], weight.shape, is_coalesced=True, check_invariants=False
            )
        self.optimizer.step()
        self.rows_optimizer.step()
        return loss

    def checkpoint_and_earlystop(self: Any, logs: Mapping[str, float], min_delta: float = 1e-6) -> None:
        parent: Any = super()
        self.history.append(float(logs["AUC"]))
        parent.checkpoint_and_earlystop(logs, min_delta)

    def lr_decay(self: Any, factor: float = 0.1, min_lr: float = 1e-6) -> Any:
        parent: Any = super()
        if self.tables:
            for group in self.rows_optimizer.param_groups:
                group["lr"] = max(group["lr"] * factor, min_lr)
        return parent.lr_decay(factor, min_lr)


def _model_class(task: Mapping[str, Any]) -> Any:
    """The model's class, with `_Recorded` mixed in."""
    spec = importlib.util.spec_from_file_location(task["model"], Path(task["zoo"]) / _FILES[task["model"]])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return type("Recorded", (_Recorded, getattr(module, task["model"])), {"task": task})


def _is_table(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Embedding)


class _GivenBatches:
    """Batches of a file, an epoch for each iteration."""

    def __init__(self, path: str, steps_per_epoch: int) -> None:
        arrays = np.load(path)
        self._ends = np.cumsum(arrays["sizes"]).tolist()
        self._columns = {name: torch.from_numpy(arrays[name]) for name in arrays.files if name != "sizes"}
        self._steps = steps_per_epoch
        self._epoch = 0

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        first = self._epoch * self._steps
        self._epoch += 1
        for step in range(first, first + self._steps):
            examples = slice(self._ends[step - 1] if step else 0, self._ends[step])
            yield {name: column[examples] for name, column in self._columns.items()}


def run(task: Mapping[str, Any]) -> dict[str, Any]:
    """Train and score; the outcome."""
    features: Any = importlib.import_module("fuxictr.features")
    loaders: Any = importlib.import_module("fuxictr.pytorch.dataloaders")
    importlib.import_module("fuxictr.pytorch.torch_utils").seed_everything(task["seed"])
    torch.set_num_threads(task["threads"])
    if task["batches"]:
        torch.set_default_dtype(torch.float64)
        tensor: Any = torch.Tensor
        tensor.float = tensor.double  # the models call it on their inputs
    folder = Path(task["data"])
    feature_map = features.FeatureMap(folder.name, str(folder))
    feature_map.load(str(folder / "feature_map.json"), {"embedding_dim": task["arguments"]["embedding_dim"]})
    model = _model_class(task)(
        feature_map,
        model_id="model",
        gpu=-1,
        model_root=task["work"],
        metrics=["AUC", "logloss"],
        verbose=0,
        monitor="AUC",
        task="binary_classification",
        loss="binary_crossentropy",
        optimizer=task["optimizer"],
        learning_rate=task["learning_rate"],
        early_stop_patience=task["patience"],
        reduce_lr_on_plateau=task["plateau"],
        **task["arguments"],
    )
    Path(model.checkpoint).parent.mkdir(parents=True, exist_ok=True)
    if task["initial"]:
        initial = {name: torch.from_numpy(array) for name, array in np.load(task["initial"]).items()}
        missing = model.load_state_dict(initial, strict=False)
        assert not missing.unexpected_keys, missing.unexpected_keys
        assert not {name for name, _ in model.named_parameters()} & set(missing.missing_keys), missing.missing_keys
    train, valid, test = loaders.RankDataLoader(
        feature_map,
        stage="both",
        **{f"{part}_data": str(folder / f"{part}.npz") for part in ("train", "valid", "test")},
        batch_size=task["batch_size"],
        shuffle=True,
        num_workers=0,
    )
    start_s = time.perf_counter()
    if task["batches"]:
        train = _GivenBatches(task["batches"], task["steps_per_epoch"])
    model.fit(train, epochs=task["epochs"], validation_data=valid, max_gradient_norm=task["clip_norm"])
    seconds = time.perf_counter() - start_s
    found = model.evaluate(test, metrics=["AUC", "logloss"])
    return {
        "auc": float(found["AUC"]),
        "logloss": float(found["logloss"]),
        "history": model.history,
        "parameters": sum(value.numel() for value in model.parameters()),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Run the task in the first file, write the outcome to the second."""
    logging.disable(logging.INFO)
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))


if __name__ == "__main__":
    main()
