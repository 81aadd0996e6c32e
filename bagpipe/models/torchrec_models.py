"""Models by name, built from torchrec modules, and a user's own model by "module:function".

A builder takes (schema, model config) and returns a module called as ``model(dense, sparse)``, which returns logits
``[num_examples]`` or ``[num_examples, 1]``, or a tuple of them, one per label. Embedding collections are built on the
meta device, because their rows live in the store. Data without dense columns gets one constant column, which torchrec's
models need.
"""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP

from bagpipe.config.sections import ModelConfig
from bagpipe.errors import InputError
from bagpipe.models.dcnv2 import DCNv2
from bagpipe.models.deepfm import DeepFM
from bagpipe.models.finalmlp import FeatureGate, FinalMLP
from bagpipe.models.layers import FUXICTR_INIT_BOUND, pooled_width
from bagpipe.models.mixed_bags import MixedBags
from bagpipe.models.task_models import TASK_MODELS, build_task_model
from bagpipe.types.schema import DataSchema

__all__ = ["MODELS", "NUM_TOWERS", "Towers", "WideDeep", "build_model", "embedding_bags", "num_dense_inputs"]

#: Rank of DCN-v2's cross network, as in MLPerf's DLRM-DCNv2 reference. The width of the input caps it.
DCN_RANK = 512

#: Dense branches of `Towers`, as in GraphPipe's DLRM (Jeon et al., ASPLOS 2025).
NUM_TOWERS = 7

_POOLING = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}


def num_dense_inputs(schema: DataSchema) -> int:
    """Number of dense input columns: those of the data, or one constant."""
    return max(1, len(schema.dense))


def embedding_bags(
    schema: DataSchema, embedding_dim: int, *, extra_dim: int = 0, init_bound: float | None = None
) -> EmbeddingBagCollection | MixedBags:
    """The tables of the schema as one module, on the meta device: a KeyedJaggedTensor to a KeyedTensor.

    The result holds the tables in the order of the schema, and of each table its features in the order of the schema.

    Args:
        schema: schema of the data; tables with pooling ``none`` are summed. If any feature has per-id weights, the
            tables with mean pooling are a collection of their own.
        embedding_dim: dimension of tables that have none in the schema.
        extra_dim: added to every dimension.
        init_bound: initial weights are uniform within it; None: as `convert` chooses.
    """
    configs = [
        EmbeddingBagConfig(
            # Renamed below: torchrec makes the name an attribute, which "items" or "a.b" cannot be.
            name=f"table_{number}",
            embedding_dim=(table.dim or embedding_dim) + extra_dim,
            # torchrec needs a number of rows; an unbounded table has none, and nothing uses it.
            num_embeddings=table.rows or 1,
            feature_names=[feature.name for feature in schema.features if feature.table == table.name],
            pooling=_POOLING.get(table.pooling, PoolingType.SUM),
            weight_init_min=None if init_bound is None else -init_bound,
            weight_init_max=init_bound,
        )
        for number, table in enumerate(schema.tables)
    ]
    is_weighted = any(feature.weighted for feature in schema.features)
    means = [config for config in configs if config.pooling == PoolingType.MEAN]
    bags: EmbeddingBagCollection | MixedBags
    if is_weighted and means:
        sums = [config for config in configs if config.pooling != PoolingType.MEAN]
        bags = MixedBags(
            weighted=_collection(sums, is_weighted=True),
            unweighted=_collection(means, is_weighted=False),
            configs=configs,
        )
    else:
        bags = _collection(configs, is_weighted=is_weighted)
    for config, table in zip(bags.embedding_bag_configs(), schema.tables, strict=True):
        # Rows are stored under the table's own name. `convert` reads only the configs.
        config.name = table.name
    return bags


def _collection(configs: list[EmbeddingBagConfig], *, is_weighted: bool) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=configs, is_weighted=is_weighted, device=torch.device("meta"))


def _dlrm(schema: DataSchema, config: ModelConfig) -> nn.Module:
    dim = _common_dim(schema, config)
    model: nn.Module = DLRM(
        embedding_bag_collection=embedding_bags(schema, dim),
        dense_in_features=num_dense_inputs(schema),
        dense_arch_layer_sizes=[*config.bottom_mlp, dim],
        over_arch_layer_sizes=[*config.top_mlp, 1],
    )
    return model


def _dcnv2(schema: DataSchema, config: ModelConfig) -> nn.Module:
    dim = _common_dim(schema, config)
    model: nn.Module = DLRM_DCN(
        embedding_bag_collection=embedding_bags(schema, dim),
        dense_in_features=num_dense_inputs(schema),
        dense_arch_layer_sizes=[*config.bottom_mlp, dim],
        over_arch_layer_sizes=[*config.top_mlp, 1],
        dcn_num_layers=config.cross_layers,
        dcn_low_rank_dim=min(DCN_RANK, (len(schema.features) + 1) * dim),
    )
    return model


def _deepfm(schema: DataSchema, config: ModelConfig) -> nn.Module:
    config.check_widths("bottom_mlp", "top_mlp")
    model = SimpleDeepFMNN(
        num_dense_features=num_dense_inputs(schema),
        embedding_bag_collection=embedding_bags(schema, _common_dim(schema, config)),
        hidden_layer_size=config.bottom_mlp[0],
        deep_fm_dimension=config.top_mlp[0],
    )
    # torchrec's DeepFM ends with a sigmoid. The loss takes logits, which is exact for large values.
    model.over_arch.model[-1] = nn.Identity()
    built: nn.Module = model
    return built


def _wide_deep(schema: DataSchema, config: ModelConfig) -> nn.Module:
    config.check_widths("top_mlp")
    return WideDeep(schema, config)


class WideDeep(nn.Module):
    """Wide & Deep (Cheng et al. 2016): a linear model of the sparse features plus an MLP over their embeddings.

    The first weight of a row is its linear (wide) weight, the others are its embedding: one row serves both parts.
    """

    def __init__(self, schema: DataSchema, config: ModelConfig) -> None:
        super().__init__()
        self.embeddings = embedding_bags(schema, config.embedding_dim, extra_dim=1)
        dims = [table.embedding_dim for table in self.embeddings.embedding_bag_configs() for _ in table.feature_names]
        self.wide_dense = nn.Linear(num_dense_inputs(schema), 1)
        self.deep = MLP(num_dense_inputs(schema) + sum(dims) - len(dims), list(config.top_mlp))
        self.head = nn.Linear(config.top_mlp[-1], 1)
        starts = torch.tensor([0, *dims[:-1]]).cumsum(0)
        is_wide = torch.zeros(sum(dims), dtype=torch.bool)
        is_wide[starts] = True
        self.register_buffer("wide_columns", is_wide.nonzero().flatten(), persistent=False)
        self.register_buffer("deep_columns", (~is_wide).nonzero().flatten(), persistent=False)

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        """Logits ``[num_examples, 1]``."""
        pooled = self.embeddings(sparse).values()
        wide = pooled.index_select(1, self.wide_columns).sum(1, keepdim=True) + self.wide_dense(dense)
        deep: Tensor = self.head(self.deep(torch.cat([dense, pooled.index_select(1, self.deep_columns)], dim=1)))
        logits: Tensor = wide + deep
        return logits


def _towers(schema: DataSchema, config: ModelConfig) -> nn.Module:
    config.check_widths("bottom_mlp", "top_mlp")
    return Towers(schema, config)


class Towers(nn.Module):
    """Parallel dense branches, each over the dense inputs and a share of the embeddings, then a joint tower.

    Branch b reads the pooled vectors of features [F b / 7, F (b + 1) / 7) of all F features; the range can be empty.
    """

    def __init__(self, schema: DataSchema, config: ModelConfig) -> None:
        super().__init__()
        self.embeddings = embedding_bags(schema, config.embedding_dim)
        dims = [table.embedding_dim for table in self.embeddings.embedding_bag_configs() for _ in table.feature_names]
        bounds = [len(dims) * branch // NUM_TOWERS for branch in range(NUM_TOWERS + 1)]
        self.widths = [sum(dims[start:end]) for start, end in pairwise(bounds)]
        self.branches = nn.ModuleList(
            MLP(num_dense_inputs(schema) + width, list(config.bottom_mlp)) for width in self.widths
        )
        self.top = MLP(NUM_TOWERS * config.bottom_mlp[-1], list(config.top_mlp))
        self.head = nn.Linear(config.top_mlp[-1], 1)

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        """Logits ``[num_examples, 1]``."""
        pooled = torch.split(self.embeddings(sparse).values(), self.widths, dim=1)
        outs = [
            branch(torch.cat([dense, pooled[number]], dim=1) if self.widths[number] else dense)
            for number, branch in enumerate(self.branches)
        ]
        logits: Tensor = self.head(self.top(torch.cat(outs, dim=1)))
        return logits


def _dcnv2_fuxictr(schema: DataSchema, config: ModelConfig) -> nn.Module:
    config.check_widths("top_mlp")
    return DCNv2(
        embedding_bags(schema, config.embedding_dim, init_bound=FUXICTR_INIT_BOUND),
        num_dense=len(schema.dense),
        dim=config.embedding_dim,
        hidden=config.top_mlp,
        cross_layers=config.cross_layers,
        structure=config.structure,
        dropout=config.dropout,
        batch_norm=config.batch_norm,
    )


def _deepfm_fuxictr(schema: DataSchema, config: ModelConfig) -> nn.Module:
    config.check_widths("top_mlp")
    dim = _common_dim(schema, config)
    return DeepFM(
        embedding_bags(schema, dim, extra_dim=1, init_bound=FUXICTR_INIT_BOUND),
        num_dense=len(schema.dense),
        dim=dim,
        hidden=config.top_mlp,
        dropout=config.dropout,
        batch_norm=config.batch_norm,
    )


def _finalmlp(schema: DataSchema, config: ModelConfig) -> nn.Module:
    config.check_widths("bottom_mlp", "top_mlp")
    bags = embedding_bags(schema, config.embedding_dim, init_bound=FUXICTR_INIT_BOUND)
    width = len(schema.dense) * config.embedding_dim + pooled_width(bags)
    gates = None
    if config.gate_mlp:
        gates = (_gate(schema, config, "first_gate", width), _gate(schema, config, "second_gate", width))
    return FinalMLP(
        bags,
        num_dense=len(schema.dense),
        dim=config.embedding_dim,
        hidden=(config.bottom_mlp, config.top_mlp),
        heads=config.heads,
        dropout=(config.dropout, config.dropout),
        batch_norm=config.batch_norm,
        gates=gates,
    )


def _gate(schema: DataSchema, config: ModelConfig, key: str, width: int) -> FeatureGate:
    """The gate of key ``model.first_gate`` or ``model.second_gate``, with tables of its own."""
    names = config.gate_context(key)
    unknown = set(names) - {*schema.dense, *(feature.name for feature in schema.features)}
    if unknown:
        raise InputError(f"model.{key} names {sorted(unknown)[0]!r}, which is no column of the data")
    context = schema.context(names, key)
    dim = config.embedding_dim
    return FeatureGate(
        None if context is None else embedding_bags(context, dim, init_bound=FUXICTR_INIT_BOUND),
        [number for number, name in enumerate(schema.dense) if name in names],
        dim=dim,
        hidden=config.gate_mlp,
        outputs=width,
    )


def _task_model(schema: DataSchema, config: ModelConfig) -> nn.Module:
    return build_task_model(embedding_bags(schema, config.embedding_dim), schema, config)


MODELS: Mapping[str, Callable[[DataSchema, ModelConfig], nn.Module]] = {
    "dlrm": _dlrm,
    "dcnv2": _dcnv2,
    "deepfm": _deepfm,
    "wide-deep": _wide_deep,
    "towers": _towers,
    "dcnv2-fuxictr": _dcnv2_fuxictr,
    "deepfm-fuxictr": _deepfm_fuxictr,
    "finalmlp": _finalmlp,
    **dict.fromkeys(TASK_MODELS, _task_model),
}


def build_model(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """Build the model of the configuration.

    Raises:
        InputError: unknown model or factory, or the model does not support the schema.
    """
    if config.factory:
        return _from_factory(schema, config)
    if config.name not in MODELS:
        raise InputError(f"model.name must be one of {', '.join(MODELS)}, got {config.name!r}")
    if len(schema.labels) > 1 and config.name not in TASK_MODELS:
        raise InputError(
            f"model.name {config.name} has one logit, and the data {len(schema.labels)} labels, "
            f"{', '.join(schema.labels)}: expected {', '.join(TASK_MODELS)}, or a model.factory"
        )
    return MODELS[config.name](schema, config)


def _from_factory(schema: DataSchema, config: ModelConfig) -> nn.Module:
    module_name, colon, function_name = config.factory.partition(":")
    if not colon or not module_name or not function_name:
        raise InputError(f'model.factory must be "module:function", got {config.factory!r}')
    try:
        factory = getattr(importlib.import_module(module_name), function_name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # an import inside the factory's module fails: show its traceback
        raise InputError(f"model.factory: no module {module_name!r} on the path") from None
    if not callable(factory):
        raise InputError(f"model.factory: module {module_name!r} has no function {function_name!r}")
    try:
        model = factory(schema, config)
    except KeyError as error:
        if not _is_name_of_table(error):
            raise
        raise InputError(
            f"model.factory {config.factory}: torchrec cannot hold a table of that name ({error.args[0]}); choose "
            "another, or make the tables with bagpipe.models.torchrec_models.embedding_bags, which takes any name"
        ) from None
    if not isinstance(model, nn.Module):
        raise InputError(f"model.factory: expected {config.factory!r} to return a module, got {type(model).__name__}")
    return model


def _is_name_of_table(error: KeyError) -> bool:
    """Whether torchrec failed to make a table's name an attribute of a ModuleDict: ``items``, ``keys`` or ``a.b``."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_torchrecs = any(
        code.co_filename.endswith(os.path.join("torchrec", "modules", "embedding_modules.py")) for code in frames
    )
    return is_torchrecs and frames[-1].co_name == "add_module"


def _common_dim(schema: DataSchema, config: ModelConfig) -> int:
    """The common dimension of all tables, which models with feature interactions need."""
    dims = {table.dim or config.embedding_dim for table in schema.tables}
    if len(dims) != 1:
        raise InputError(f"model {config.name} needs tables of one dimension, the schema has {sorted(dims)}")
    return dims.pop()
