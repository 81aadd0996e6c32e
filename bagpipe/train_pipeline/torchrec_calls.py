"""`TorchrecCalls`: names and keywords of torchrec's train pipelines, in `TrainPipeline`.

What they mean is what happens: taken. Otherwise: refused in one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypedDict

import torch
from torch import nn
from torch.optim import Optimizer

from bagpipe.errors import InputError
from bagpipe.train_pipeline.error_texts import speaks_arguments
from bagpipe.train_pipeline.model_parts import ModelParts

__all__ = ["TorchrecCalls", "TorchrecKeywords", "check_keywords"]


class TorchrecKeywords(TypedDict, total=False):
    """Keywords of torchrec's pipelines that `TrainPipeline` knows."""

    execute_all_batches: bool
    apply_jit: bool
    context_type: Any
    pipeline_postproc: bool
    custom_model_fwd: Any
    dmp_collection_sync_interval_batches: int | None
    enqueue_batch_after_forward: bool
    enable_inplace_copy_batch: bool
    free_features_storage_early: bool
    clear_data_dist_inputs: bool
    async_inplace_copy: bool


_STAGES = "it is about stages of torchrec's pipelines, which are others here"
#: Keyword -> the values that change nothing, and why others are refused.
_KEYWORDS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "execute_all_batches": ((True,), "all batches of an iterator are trained"),
    "apply_jit": ((False,), "compile the dense part with torch.compile"),
    "context_type": ((), _STAGES),
    # Results are the same with and without. A collection that gets other ids than those of the batch refuses them.
    "pipeline_postproc": ((False, True), "it is on or off"),
    "custom_model_fwd": ((None,), "wrap the model in a module whose forward calls it so"),
    "dmp_collection_sync_interval_batches": ((None, 1), "all ranks have the same model after every batch"),
    "enqueue_batch_after_forward": ((False,), "batches are read ahead beside the model: see lookahead"),
    "enable_inplace_copy_batch": ((False,), "a batch gets memory of its own on the device"),
    "free_features_storage_early": ((False,), "the model gets the ids of its batch"),
    "clear_data_dist_inputs": ((False,), _STAGES),
    "async_inplace_copy": ((False,), "a batch gets memory of its own on the device"),
}


def check_keywords(given: Mapping[str, Any]) -> None:
    """Check keywords of torchrec's pipelines.

    Raises:
        TypeError: torchrec's pipelines have no such keyword either.
        InputError: what it asks for is not what happens.
    """
    for name, value in given.items():
        if name not in _KEYWORDS:
            raise TypeError(f"TrainPipeline.__init__() got an unexpected keyword argument {name!r}")
        same, reason = _KEYWORDS[name]
        if not any(value is each for each in same):
            raise InputError(f"{name} must be left out{_or(same)}, got {value!r}: {reason}")


def _or(values: tuple[Any, ...]) -> str:
    return f" or {' or '.join(map(repr, values))}" if values else ""


@speaks_arguments
class TorchrecCalls:
    """A part of `TrainPipeline`."""

    _parts: ModelParts

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._parts.converted.model

    @property
    def optimizer(self) -> Optimizer:
        """Of its dense parameters."""
        return self._parts.optimizer

    @property
    def _model(self) -> nn.Module:
        return self.model

    @property
    def _optimizer(self) -> Optimizer:
        return self.optimizer

    @property
    def _device(self) -> torch.device:
        return self._parts.device

    def detach(self) -> NoReturn:
        """Refused: without the pipeline the model has no rows.

        Raises:
            InputError: always.
        """
        raise InputError(
            "a model cannot be detached, its rows are in the store: evaluate(loader) scores batches at any time, and "
            "export(folder) writes weights that the same model takes in plain torchrec"
        )

    def attach(self, model: nn.Module | None = None) -> NoReturn:
        """Refused: a pipeline keeps its model.

        Raises:
            InputError: always.
        """
        raise InputError("a pipeline keeps its model: make another pipeline for another model")

    def __repr__(self) -> str:
        tables = [table.name for table in self._parts.rows.tables]
        return f"<TrainPipeline of {type(self.model).__name__} with tables {', '.join(tables)} on {self._device}>"

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a pipeline has threads and connections, so it cannot be copied or pickled: save(folder) makes a "
            "checkpoint, and pipeline.model can be copied"
        )
