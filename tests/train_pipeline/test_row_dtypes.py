"""Tables with rows of their own dtypes: by `data_type`, by `row_dtype`, and what does not fit together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torchrec import EmbeddingBagCollection
from torchrec.modules.embedding_configs import DataType

import bagpipe
from bagpipe.errors import InputError
from bagpipe.optim import SGD, Adagrad, Frozen, RowWiseAdagrad
from tests.distributed.processes import Ended
from tests.train_pipeline.plain_loop import PlainLoop, assert_close
from tests.train_pipeline.rank_jobs import made, on_ranks, shard, values_of
from tests.train_pipeline.small import (
    DIM,
    FEATURES,
    RATE,
    ROWS,
    Plain,
    Small,
    assert_same,
    batches,
    pipeline,
    progress_all,
    state_of,
)

HALVES = {"t_f1": "float16", "t_f2": "bfloat16"}
DTYPES = {"t_f0": torch.float32, "t_f1": torch.float16, "t_f2": torch.bfloat16}
ROW_OPTIMIZERS = (Adagrad(RATE), {"t_f0": RowWiseAdagrad(RATE), "t_f1": SGD(RATE), "*": Adagrad(RATE)})


class Typed(Small):
    """The small model; its tables have the `data_type`s FP32, FP16 and BF16."""

    def __init__(self, *types: DataType, device: str = "meta") -> None:
        super().__init__()
        configs = self.bags.embedding_bag_configs()
        for config, kind in zip(configs, types or (DataType.FP32, DataType.FP16, DataType.BF16), strict=True):
            config.data_type = kind
        self.bags = EmbeddingBagCollection(device=torch.device(device), tables=configs)


def _trained(model: Small | None = None, num: int = 12, **more: Any) -> dict[str, Tensor]:
    with pipeline(model, **more) as trained:
        progress_all(trained, iter(batches(num)))
        return state_of(trained)


# ---- where dtypes come from ------------------------------------------------------------------------------------------


def test_data_types_are_the_dtypes_of_the_rows() -> None:
    state = _trained(Typed())
    assert {name: state[name].dtype for name in DTYPES} == DTYPES
    assert_same(state, _trained(row_dtype=HALVES))
    assert state["over.weight"].dtype == torch.float32


def test_row_dtype_comes_before_data_types() -> None:
    """One for all tables, or by name; tables that it does not name keep theirs."""
    of_all = _trained(Typed(), row_dtype="float32")
    assert_same(of_all, _trained())
    one = _trained(Typed(), row_dtype={"t_f1": "bfloat16"})
    assert [one[name].dtype for name in DTYPES] == [torch.float32, torch.bfloat16, torch.bfloat16]
    others = _trained(Typed(), row_dtype={"t_f0": "float16", "*": "float32"})
    assert [others[name].dtype for name in DTYPES] == [torch.float16, torch.float32, torch.float32]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: pipeline(Typed(DataType.INT8, DataType.FP32, DataType.FP32)),
            "table 't_f0': data_type must be one of FP32, FP16, BF16, got INT8",
        ),
        (
            lambda: pipeline(Typed().double()),
            "table 't_f1': rows of float16 need a dense part of float32, got float64",
        ),
        (
            lambda: pipeline(Small().double(), row_dtype="bfloat16"),
            "table 't_f0': rows of bfloat16 need a dense part of float32, got float64",
        ),
        (
            lambda: pipeline(row_dtype={"t_f1": "float64"}),
            "table 't_f1' has rows of float64, other tables rows of float32: expected tables of float64 only, or of "
            "float32, float16 and bfloat16",
        ),
        (
            lambda: pipeline(row_dtype={"f1": "float16"}),
            "row_dtype names table 'f1', the model has ['t_f0', 't_f1', 't_f2']",
        ),
    ],
)
def test_dtypes_that_do_not_fit_are_refused_in_one_line(make: Any, text: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value) == text


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROW_OPTIMIZERS)
def test_results_depend_on_neither_cache_nor_planner(rows: Any) -> None:
    direct = _trained(Typed(), rows=rows, cache_rows=0)
    for settings in ({"cache_rows": 70}, {"lookahead": 1, "prefetch_depth": 1}, {"planner": "process"}):
        assert_same(_trained(Typed(), rows=rows, **settings), direct)
    assert_same(_trained(Typed(), rows=rows, accumulate=2), _trained(Typed(), rows=rows, accumulate=2, cache_rows=0))


_KILLED = """
import os, signal, sys
from tests.train_pipeline.small import batches, pipeline
from tests.train_pipeline.test_row_dtypes import Typed
settings = dict(zip(("store", "namespace", "checkpoint_dir"), sys.argv[1:]))
with pipeline(Typed(), **settings, checkpoint_every=4) as trained:
    for _ in trained.train(batches(12)):
        if trained.step == 10:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.redis
@pytest.mark.multiproc
def test_a_killed_process_resumes_bit_for_bit(redis_server: Any, namespace: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, redis_server.url, namespace, folder], timeout=250, check=False
    )
    assert killed.returncode == -9
    settings = {"store": redis_server.url, "namespace": namespace, "checkpoint_dir": folder, "checkpoint_every": 4}
    with pipeline(Typed(), **settings) as trained:
        rest: Iterator[Any] = trained.train(batches(12))
        assert 12 - len(list(rest)) in (0, 4, 8)
        assert_same(state_of(trained), _trained(Typed(), cache_rows=0))


def _train_rank(rank: int, kills: bool, settings: dict[str, Any]) -> Any:
    with made(Typed(), **settings) as trained:
        for _ in trained.train(shard(rank)):
            if kills and trained.step == 7:
                os.kill(os.getpid(), signal.SIGKILL)
        state = state_of(trained)
        return values_of({name: value.float() for name, value in state.items()})


def _states(ended: list[Ended]) -> list[Any]:
    assert [rank.error for rank in ended] == [None] * len(ended)
    return [rank.value for rank in ended]


@pytest.mark.redis
@pytest.mark.multiproc
def test_two_ranks_have_the_bits_of_two_without_a_cache_killed_or_not(
    redis_server: Any, namespace: str, tmp_path: Path
) -> None:
    direct = _states(on_ranks(2, _train_rank, False, {"cache_rows": 0}))
    where = {
        "store": redis_server.url,
        "namespace": namespace,
        "checkpoint_dir": str(tmp_path / "checkpoints"),
        "checkpoint_every": 2,
        "cache_rows": 60,
    }
    assert -9 in [rank.code for rank in on_ranks(2, _train_rank, True, where)]
    for state, expected in zip(_states(on_ranks(2, _train_rank, False, where)), direct, strict=True):
        assert state.keys() == expected.keys()
        assert all(np.array_equal(state[name], expected[name]) for name in state)


class _Separate(Typed):
    """The gradient of a table depends on this table alone."""

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        vectors = self.bags(batch["ids"]).values()
        loss = (vectors - batch["labels"].unsqueeze(1)).square().mean(0).sum()
        return loss + 0 * self.over.weight.sum(), vectors.detach()


@pytest.mark.parametrize("rows", [Adagrad(RATE), SGD(RATE)])
def test_a_table_has_the_bits_that_it_has_among_tables_of_its_dtype(rows: Any) -> None:
    """Rounding is a function of seed, table, id and step."""
    mixed = _trained(_Separate(), rows=rows)
    for name, dtype in DTYPES.items():
        alike = _trained(_Separate(), rows=rows, row_dtype=str(dtype).removeprefix("torch."))
        assert torch.equal(mixed[name], alike[name])


# ---- a plain loop ----------------------------------------------------------------------------------------------------


def test_training_equals_a_plain_loop_that_rounds() -> None:
    """Up to the last place of a weight whose float32 value lies between two halves."""
    with pipeline(Typed(), rounding="nearest", cache_rows=70) as trained:
        losses = progress_all(trained, iter(batches(12)))
        ours = {name: value.float() for name, value in state_of(trained).items()}
    loop = PlainLoop(Plain().float())
    tables = {name: loop.model.tables[name.removeprefix("t_")].weight for name in DTYPES}
    _round(tables)
    for batch, loss in zip(batches(12), losses, strict=True):
        expected, _ = loop.model(batch)
        loop.zero_grad()
        expected.backward()
        loop.step()
        _round(tables)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-4)
    plain = loop.state()
    for name, dtype in DTYPES.items():
        step = torch.finfo(dtype).eps * plain[name].abs().max().item()
        torch.testing.assert_close(ours[name], plain[name], rtol=0, atol=1.5 * step + 1e-5)
        # Nearly all are equal: a rounding that loses or adds something would move most.
        assert (ours[name] - plain[name]).abs().gt(1e-5).float().mean() < 0.05
    assert_close({"w": ours["over.weight"]}, {"w": plain["over.weight"]}, atol=1e-3)


def _round(tables: Mapping[str, Tensor]) -> None:
    for name, weight in tables.items():
        weight.data = weight.data.to(DTYPES[name]).float()


# ---- rows that come and go -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [ROW_OPTIMIZERS[1], {"t_f1": Frozen(), "*": Adagrad(RATE)}])
def test_an_export_goes_on_bit_for_bit(tmp_path: Path, rows: Any) -> None:
    settings: dict[str, Any] = {"rows": rows, "rounding": "nearest"}
    with pipeline(Typed(), **settings) as trained:
        trained.load_rows("t_f1", None, torch.rand(ROWS, DIM))
        iterator = iter(batches(8))
        for _ in range(4):
            trained.progress(iterator)
        trained.export(tmp_path / "out")
        half = trained.state_dict()
        # torchrec's own collections on a real device have float16 for BF16 too, and convert what they load.
        weights = load_file(tmp_path / "out" / "model.safetensors")
        assert {name: weights[f"bags.embedding_bags.{name}.weight"].dtype for name in DTYPES} == DTYPES
        Typed(device="cpu").load_state_dict(weights, strict=True)
        progress_all(trained, iterator)
        expected = state_of(trained)
    with pipeline(Typed(), **settings) as again:
        again.load_rows_from(tmp_path / "out" / "model.safetensors", state=tmp_path / "out" / "optimizer.safetensors")
        again.model.load_state_dict(half["model"])
        again.optimizer.load_state_dict(half["optimizer"])
        progress_all(again, iter(batches(8)[4:]))
        assert_same(state_of(again), expected)


def test_weights_of_the_collections_are_the_first_rows() -> None:
    model = Typed(device="cpu")
    held = {f"t_{name}": model.bags.embedding_bags[f"t_{name}"].weight.detach().clone() for name in FEATURES}
    with pipeline(model, import_weights=True) as trained:
        for name, weights in held.items():
            assert torch.equal(trained.rows(name)[torch.arange(ROWS)], weights.to(DTYPES[name]))


def test_a_namespace_with_rows_of_other_dtypes_is_refused_with_both() -> None:
    store = "memory://row-dtypes"
    with pipeline(Typed(), store=store) as trained:
        progress_all(trained, iter(batches(2)))
        expected = state_of(trained)
    with pipeline(Typed(), store=store, existing="rows-only") as trained:
        rows = state_of(trained)
        assert all(torch.equal(rows[name], expected[name]) for name in DTYPES)
    text = "made with table 't_f1' dtype 'float16', this job has 'bfloat16'"
    other = {"t_f1": "bfloat16", "t_f2": "bfloat16"}
    with pipeline(row_dtype={"t_f1": "bfloat16", "t_f2": "float16"}, store=store, existing="rows-only") as trained:
        with pytest.raises(InputError, match=text):
            trained.progress(iter(batches(1)))
    with pipeline(row_dtype=other, store=store, namespace="another") as trained:
        trained.load_rows_of("bagpipe")
        with pytest.raises(InputError, match="made with dtype 'float32', this job has 'bfloat16'"):
            trained.progress(iter(batches(1)))


def test_a_checkpoint_with_rows_of_other_dtypes_is_refused(tmp_path: Path) -> None:
    with pipeline(Typed(), checkpoint_dir=str(tmp_path)) as trained:
        progress_all(trained, iter(batches(2)))
    for row_dtype, text in (
        (None, r"rows\.tables\[1\]\.dtype 'float16', this job has 'float32'"),
        ({"t_f1": "bfloat16", "t_f2": "float16"}, r"rows\.tables\[1\]\.dtype 'float16', this job has 'bfloat16'"),
    ):
        with pytest.raises(InputError, match=text):
            with pipeline(row_dtype=row_dtype, checkpoint_dir=str(tmp_path)) as other:
                other.progress(iter(batches(1)))


def test_a_saved_step_of_one_table_is_in_its_dtype() -> None:
    with bagpipe.TrainPipeline(
        Typed(), lambda parameters: torch.optim.SGD(parameters, lr=0.1), rows=SGD(RATE), store="memory://"
    ) as trained:
        progress_all(trained, iter(batches(1)))
        for name, dtype in DTYPES.items():
            found = [weights for _, weights in trained.rows(name)]
            assert {weights.dtype for weights in found} == {dtype}
