"""Models and optimizers that are trained, in the words of both systems.

The widths are smaller than BARS', because the sample has 80,000 examples. All else follows BARS' configurations:
dropout, batch norm, gates of FinalMLP, gradients limited to a norm of 10, early stop after two evaluations that are not
better than the best, whose weights are scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.bars.prepare import NUMBERS

__all__ = [
    "ALL_ROWS_DECAY",
    "BATCH_SIZE",
    "CLIP_NORM",
    "DROPOUT",
    "MODELS",
    "OPTIMIZERS",
    "PATIENCE",
    "Model",
    "Optimizer",
    "Outcome",
    "Run",
]

BATCH_SIZE = 1024
CLIP_NORM = 10.0  # FuxiCTR's default
PATIENCE = 2
_DIM = 4
DROPOUT = 0.1
#: L2 decay of rows makes a row that is used again catch up with all updates it has missed, as if each batch had moved
#: it. This one is too small to decay anything.
ALL_ROWS_DECAY = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model in both systems.

    Attributes:
        ours: keys of the section ``model``.
        fuxictr: class of FuxiCTR's model_zoo.
        arguments: of the class.
        dropout: names of its arguments that are dropout rates.
    """

    ours: Mapping[str, Any]
    fuxictr: str
    arguments: Mapping[str, Any]
    dropout: tuple[str, ...]


MODELS: Mapping[str, Model] = {
    "DCNv2": Model(
        ours={"name": "dcnv2-fuxictr", "top_mlp": (64, 32), "cross_layers": 2},
        fuxictr="DCNv2",
        arguments={
            "model_structure": "parallel",
            "num_cross_layers": 2,
            "parallel_dnn_hidden_units": [64, 32],
            "batch_norm": True,
        },
        dropout=("net_dropout",),
    ),
    "DeepFM": Model(
        ours={"name": "deepfm-fuxictr", "top_mlp": (64, 32)},
        fuxictr="DeepFM",
        arguments={"hidden_units": [64, 32], "batch_norm": True},
        dropout=("net_dropout",),
    ),
    "FinalMLP": Model(
        ours={
            "name": "finalmlp",
            "bottom_mlp": (64, 32),
            "top_mlp": (64,),
            "heads": 4,
            "gate_mlp": (32,),
            "first_gate": ",".join(NUMBERS),
            "second_gate": "C20",
        },
        fuxictr="FinalMLP",
        arguments={
            "mlp1_hidden_units": [64, 32],
            "mlp1_batch_norm": True,
            "mlp2_hidden_units": [64],
            "mlp2_batch_norm": True,
            "num_heads": 4,
            "use_fs": True,
            "fs_hidden_units": [32],
            "fs1_context": list(NUMBERS),
            "fs2_context": ["C20"],
        },
        dropout=("mlp1_dropout", "mlp2_dropout"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """One optimizer for rows and dense parameters.

    Attributes:
        ours: value of ``optim.rows`` and ``optim.dense``.
        fuxictr: name in torch.optim; FuxiCTR gives it the rate and nothing else.
        rate: of learning.
        eps: torch's default, which FuxiCTR takes.
    """

    ours: str
    fuxictr: str
    rate: float
    eps: float


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adam": Optimizer(ours="adam", fuxictr="adam", rate=1e-3, eps=1e-8),  # BARS'
    "adagrad": Optimizer(ours="adagrad", fuxictr="Adagrad", rate=1e-2, eps=1e-10),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one system.

    Attributes:
        system: ours; fuxictr; lazy: FuxiCTR with torch's SparseAdam for the rows of the batch; sparse-adam: the same
            for all rows; or all-rows: ours with an L2 decay of rows of `ALL_ROWS_DECAY`.
        model, optimizer: keys of `MODELS` and `OPTIMIZERS`.
        seed: of initial values, order and dropout.
        epochs: at most.
        dropout: rate of the hidden layers.
        same_start: train in float64; FuxiCTR starts from the initial values of ours and gets the batches of ours.
    """

    system: str
    model: str
    optimizer: str
    seed: int
    epochs: int = 8
    dropout: float = 0.0
    same_start: bool = False

    @property
    def our_model(self) -> Mapping[str, Any]:
        """Keys of the section ``model``."""
        keys = {"embedding_dim": _DIM, "dropout": self.dropout, "batch_norm": True}
        return {**keys, **MODELS[self.model].ours}

    @property
    def fuxictr_arguments(self) -> Mapping[str, Any]:
        """Arguments of FuxiCTR's class."""
        model = MODELS[self.model]
        return {"embedding_dim": _DIM, **dict.fromkeys(model.dropout, self.dropout), **model.arguments}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one run.

    Attributes:
        auc, logloss: of the test examples, with the best weights.
        history: AUC of the validation examples after each epoch.
        parameters: numbers that are trained, rows of all tables included.
        seconds: of training, evaluations included.
    """

    auc: float
    logloss: float
    history: list[float] = field(default_factory=list)
    parameters: int = 0
    seconds: float = 0.0
