"""Models that a pipeline refuses because something on them would be lost, and dtypes that stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.utils import parametrizations, parametrize, weight_norm
from torch.optim.swa_utils import AveragedModel
from torchrec import DataType, EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

import bagpipe
from bagpipe.errors import InputError
from bagpipe.optim import Adagrad, Frozen
from bagpipe.train_pipeline.model_checks import dtype_of
from tests.train_pipeline.rank_jobs import on_ranks, shard
from tests.train_pipeline.small import (
    DIM,
    FEATURES,
    ROWS,
    Small,
    assert_same,
    batches,
    pipeline,
    progress_all,
    state_of,
)


class Mixed(Small):
    """A dense part of three dtypes, with a batch norm, whose buffers are half too."""

    def __init__(self, half: torch.dtype) -> None:
        super().__init__()
        width = DIM * len(FEATURES)
        self.first = nn.Linear(width, width).to(half)
        self.norm = nn.BatchNorm1d(width).to(half)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        hidden = self.norm(self.first(self.bags(batch["ids"]).values().to(self.first.weight.dtype)))
        scores = (self.over(hidden.float()) * self.scale.float()).squeeze(-1)
        return (scores - batch["labels"].float()).square().mean(), scores.detach()


def _trained(cache_rows: int, half: torch.dtype) -> dict[str, Tensor]:
    model = Mixed(half)
    with pipeline(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), cache_rows=cache_rows) as trained:
        progress_all(trained, iter(batches(5)))
        return {**state_of(trained), **trained.dense_state_dict()}


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_every_dense_tensor_keeps_its_dtype_and_trains_with_a_cache_as_without(half: torch.dtype) -> None:
    before = {name: value.dtype for name, value in Mixed(half).state_dict().items() if not name.startswith("bags.")}
    state = _trained(120, half)
    assert {name: state[name].dtype for name in before} == before
    assert state["t_f0"].dtype == torch.float32
    assert_same(state, _trained(0, half))


def _on_a_rank(rank: int) -> Any:
    model = Mixed(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pipeline(model, store=None, optimizer=optimizer) as trained:
        progress_all(trained, iter(shard(rank, 3)))
        state = trained.dense_state_dict()
        return {name: (str(value.dtype), value.double().tolist()) for name, value in state.items()}


@pytest.mark.multiproc
@pytest.mark.redis
def test_ranks_sum_gradients_of_several_dtypes() -> None:
    ended = on_ranks(2, _on_a_rank)
    assert [each.error for each in ended] == [None, None]
    first, second = (each.value for each in ended)
    assert first == second
    assert first["first.weight"][0] == "torch.bfloat16"


def test_a_resume_goes_on_in_the_same_dtypes(tmp_path: Any) -> None:
    states = []
    for stops in ((5,), (2, 5)):
        folder, taken = str(tmp_path / str(len(stops))), 0
        for stop in stops:
            model = Mixed(torch.bfloat16)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            with pipeline(model, optimizer=optimizer, checkpoint_dir=folder) as trained:
                iterator = iter(batches(5)[taken:])
                for _ in range(stop - taken):
                    trained.progress(iterator)
                trained.save()
                states.append(trained.dense_state_dict())
            taken = stop
    assert_same(states[0], states[2])


class Tables(nn.Module):
    """Two collections, a dense layer."""

    def __init__(self, device: str = "meta", kind: DataType = DataType.FP32) -> None:
        super().__init__()
        bag = EmbeddingBagConfig(
            name="user", embedding_dim=4, num_embeddings=ROWS, feature_names=["f0"], data_type=kind
        )
        sequence = EmbeddingConfig(name="item", embedding_dim=4, num_embeddings=ROWS, feature_names=["f1"])
        self.bags = EmbeddingBagCollection(tables=[bag], device=torch.device(device))
        self.history = EmbeddingCollection(tables=[sequence], device=torch.device(device))
        self.over = nn.Linear(4, 1)

    @property
    def user(self) -> nn.EmbeddingBag:
        return self.bags.embedding_bags["user"]  # type: ignore[no-any-return]

    @property
    def item(self) -> nn.Embedding:
        return self.history.embeddings["item"]  # type: ignore[no-any-return]


def _make(model: nn.Module, **more: Any) -> bagpipe.TrainPipeline:
    settings: dict[str, Any] = {"rows": Adagrad(0.1), "store": "memory://", "planner": "inline", **more}
    return bagpipe.TrainPipeline(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), **settings)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda model: model, "float32"),
        (lambda model: model.double(), "float64"),
        (lambda model: model.over.double(), "float64"),
        (lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(1).double())), "float32"),
        (lambda model: model.register_buffer("steps", torch.ones(1).double()), "float32"),
        (lambda model: (model.bags.double(), model.history.double()), "float64"),
        (lambda model: model.over.half(), "float32"),
    ],
)
def test_vectors_are_float64_where_the_dense_part_or_all_tables_are(
    change: Callable[[Any], object], expected: str
) -> None:
    model = Tables()
    change(model)
    assert dtype_of(model) == expected


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class _OwnForward(EmbeddingBagCollection):  # type: ignore[misc]
    def forward(self, features: Any) -> Any:
        return super().forward(features.permute([0]))


def _with_own_forward(model: Tables) -> None:
    model.bags = _OwnForward(tables=model.bags.embedding_bag_configs(), device=torch.device("meta"))


def _tie(model: Tables) -> None:
    model.head = nn.Linear(4, ROWS, bias=False)
    model.head.weight = model.item.weight


def _hold(model: Tables) -> None:
    model.lookup = model.item


def _share(model: Tables) -> None:
    model.user.weight = model.item.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_tie, r"weight of table 'item' is also parameter 'weight' of module 'head'"),
        (_hold, r"weight of table 'item' is also parameter 'weight' of module 'lookup'"),
        (_share, r"tables 'user' and 'item' have one weight"),
        (_with_own_forward, r"collection 'bags' \(_OwnForward\) has a forward of its own"),
        (lambda model: setattr(model.bags, "forward", _make), r"collection 'bags' \(EmbeddingBagCollection\) has a"),
        (
            lambda model: parametrize.register_parametrization(model.item, "weight", _Doubled()),
            r"table 'item': .* got ParametrizedEmbedding with",
        ),
        (lambda model: parametrizations.spectral_norm(model.user), r"got ParametrizedEmbeddingBag with"),
        (lambda model: setattr(model.user, "padding_idx", 0), r"table 'user': rows in a store have no padding_idx"),
        (lambda model: setattr(model.item, "max_norm", 1.0), r"table 'item': rows in a store have no max_norm, got 1"),
        (lambda model: model.user.register_forward_hook(print), r"table 'user' has a hook on its module"),
        (lambda model: model.item.weight.register_hook(print), r"table 'item' has a hook on its weight"),
        (lambda model: model.item.requires_grad_(False), r"table 'item' has requires_grad=False, but .*Frozen\(\)"),
        (lambda model: model.half(), r"table 'user' has weights of float16, but its data_type is FP32"),
        (lambda model: model.bags.double(), r"must all be of float64 or none, got float32 in 'item' and float64 in"),
        (lambda model: model.append(nn.LazyLinear(2)), r"module 'more' \(LazyLinear\) has no shape of its weight yet"),
        (
            lambda model: _apply_optimizer_in_backward(torch.optim.Adam, model.over.parameters(), {"lr": 0.1}),
            r"parameter 'weight' of module 'over' has an optimizer in its backward, whose state no checkpoint",
        ),
        (
            lambda model: model.append(nn.Linear(2, 2, device="meta")).weight.register_hook(print),
            r"parameter 'weight' of module 'more' is on the meta device and has a hook",
        ),
        (lambda model: model.append(nn.LazyBatchNorm1d()), r"module 'more' \(LazyBatchNorm1d\) has no shape of its"),
    ],
)
def test_what_would_be_lost_is_refused_in_one_line(change: Callable[[Any], object], message: str) -> None:
    class Open(Tables):
        def append(self, module: Any) -> Any:
            self.more = module
            return module

    model = Open()
    change(model)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(InputError, match=message) as caught:
        _make(model)
    assert "\n" not in str(caught.value)
    assert [type(module) for module in model.modules()] == kinds


def test_weight_norm_of_torch_before_parametrizations_is_refused() -> None:
    model = Tables("cpu")
    with pytest.warns(FutureWarning):
        weight_norm(model.item)
    with pytest.raises(InputError, match=r"table 'item': .* \['weight_g', 'weight_v'\]"):
        _make(model, import_weights=True)


def test_what_the_arguments_name_is_taken() -> None:
    frozen = Tables()
    frozen.item.requires_grad_(False)
    _make(frozen, rows={"item": Frozen(), "*": Adagrad(0.1)}).close()
    _make(Tables().half(), row_dtype="float16").close()
    _make(Tables(kind=DataType.BF16)).close()


class _Teacher:
    """Somebody's averages, that are no module."""

    def __init__(self, model: nn.Module) -> None:
        self.copy = copy.deepcopy(model)

    def update(self, model: nn.Module) -> None:
        pairs = zip(self.copy.parameters(), model.parameters(), strict=False)
        for mean, value in pairs:
            mean.data.lerp_(value.data, 0.1)


class _Nested(nn.Module):
    """Averages of a model inside of another one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inside = nn.ModuleDict({"average": AveragedModel(nn.Sequential(model))})


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("average", [AveragedModel, _Teacher])
def test_averages_made_before_the_pipeline_are_refused(average: Callable[[nn.Module], Any], device: str) -> None:
    model = Tables(device)
    average_of_it = average(model)
    with pytest.raises(InputError, match=f"{type(average_of_it).__name__} has a copy of the model from before"):
        _make(model, import_weights=device == "cpu")
    del average_of_it
    with _make(model, import_weights=device == "cpu") as trained:
        after = average(trained.model)
        kept = after.module if isinstance(after, AveragedModel) else after.copy
        assert [name for name, _ in kept.named_parameters()] == ["over.weight", "over.bias"]


def test_averages_inside_of_other_modules_are_refused() -> None:
    model = Tables("cpu")
    nested = _Nested(model)
    with pytest.raises(InputError, match="AveragedModel has a copy of the model from before"):
        _make(model, import_weights=True)
    assert nested.inside


def test_other_models_of_the_same_class_are_none_of_its_business() -> None:
    other, copied = Tables("cpu"), copy.deepcopy(Tables("cpu"))
    average = AveragedModel(other)
    _make(Tables("cpu"), import_weights=True).close()
    assert average.module is not copied


@pytest.mark.parametrize("wrapper", ["DistributedModelParallel", "FullyShardedDataParallel", "DistributedDataParallel"])
def test_wrappers_of_whole_models_are_refused_by_name(wrapper: str) -> None:
    kind = type(wrapper, (nn.Module,), {})
    wrapped = kind()
    wrapped.module = Tables()
    with pytest.raises(InputError, match=f"expected a model without {wrapper}, got one with"):
        _make(wrapped)


def test_other_collections_of_torchrec_are_refused() -> None:
    from torchrec.modules.fused_embedding_modules import fuse_embedding_optimizer

    model = nn.ModuleDict({"own": Tables(), "fused": nn.ModuleDict({"bags": Tables().bags})})
    fused = fuse_embedding_optimizer(
        model["fused"], optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 0.1}, device=torch.device("meta")
    )
    model["fused"] = fused
    with pytest.raises(InputError, match=r"collection 'fused.bags' is a FusedEmbeddingBagCollection: expected"):
        _make(model)


def test_a_model_belongs_to_one_pipeline() -> None:
    model = Small()
    pipeline(model).close()
    for again in (model, copy.deepcopy(model)):
        with pytest.raises(InputError, match="collection 'bags' belongs to one already"):
            pipeline(again)
