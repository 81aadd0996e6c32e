"""Names and keywords of torchrec's pipelines: what they mean happens, or they are refused in one line."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch

from bagpipe.errors import InputError
from bagpipe.train_pipeline.torchrec_calls import TorchrecKeywords, check_keywords
from tests.train_pipeline.small import batches, pipeline, progress_all

with warnings.catch_warnings():  # torchrec warns about parts that a CPU build lacks
    warnings.simplefilter("ignore")
    from torchrec.distributed import TrainPipelineBase, TrainPipelineSparseDist
    from torchrec.distributed.train_pipeline.train_pipelines import (
        PrefetchTrainPipelineSparseDist,
        TrainPipelineSparseDistLite,
    )

#: Keyword -> a value that means what does not happen.
OTHERS: dict[str, Any] = {
    "execute_all_batches": False,
    "apply_jit": True,
    "context_type": dict,
    "pipeline_postproc": "later",
    "custom_model_fwd": lambda batch: batch,
    "dmp_collection_sync_interval_batches": 4,
    "enqueue_batch_after_forward": True,
    "enable_inplace_copy_batch": True,
    "free_features_storage_early": True,
    "clear_data_dist_inputs": True,
    "async_inplace_copy": True,
}


@pytest.mark.parametrize(
    "kind",
    [TrainPipelineBase, TrainPipelineSparseDist, TrainPipelineSparseDistLite, PrefetchTrainPipelineSparseDist],
)
def test_every_keyword_of_torchrec_is_known_and_its_default_taken(kind: Any) -> None:
    parameters = list(inspect.signature(kind.__init__).parameters.values())[4:]  # self, model, optimizer, device
    assert parameters
    for parameter in parameters:
        assert parameter.name in TorchrecKeywords.__annotations__
        if parameter.name == "context_type":
            continue
        check_keywords({parameter.name: parameter.default})


@pytest.mark.parametrize("name", TorchrecKeywords.__annotations__)
def test_what_does_not_happen_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} must be left out.*, got ") as caught:
        pipeline(**{name: OTHERS[name]})
    assert "\n" not in str(caught.value)


def test_keywords_that_nobody_has_are_type_errors() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'cache_row'"):
        pipeline(cache_row=3)


def test_a_program_for_torchrec_s_pipeline_trains_and_reads_its_names() -> None:
    with pipeline(execute_all_batches=True, apply_jit=False) as trained:
        assert len(progress_all(trained, iter(batches(3)))) == 3
        assert trained._model is trained.model
        assert trained._optimizer is trained.optimizer
        assert trained._device == torch.device("cpu")


@pytest.mark.parametrize("name", ["model", "optimizer", "_model", "_optimizer", "_device"])
def test_a_pipeline_keeps_its_model_and_optimizer(name: str) -> None:
    with pipeline() as trained, pytest.raises(AttributeError, match="has no setter"):
        setattr(trained, name, None)


def test_a_model_is_neither_detached_nor_attached() -> None:
    with pipeline() as trained:
        with pytest.raises(InputError, match=r"its rows are in the store: evaluate\(loader\) scores batches"):
            trained.detach()
        with pytest.raises(InputError, match="a pipeline keeps its model"):
            trained.attach(trained.model)


def test_a_pipeline_names_its_model_and_is_not_copied() -> None:
    with pipeline() as trained:
        assert repr(trained) == "<TrainPipeline of Small with tables t_f0, t_f1, t_f2 on cpu>"
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(InputError, match=r"save\(folder\) makes a checkpoint, and pipeline.model can be"):
                call(trained)
