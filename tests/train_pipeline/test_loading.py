"""Rows to begin with: from collections on a device, tensors, files of an export, and other namespaces."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bagpipe
from bagpipe.checkpoint.checkpoint_rows import check_row_sums
from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.distributed.membership import Membership
from bagpipe.errors import InputError, JobError
from bagpipe.optim import SGD, Adagrad, Frozen, RowWiseAdagrad
from tests.distributed.processes import run_ranks
from tests.train_pipeline.rank_jobs import join
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

TABLES = [f"t_{name}" for name in FEATURES]


def _weights(seed: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _import(model: Small | None = None, **more: Any) -> bagpipe.TrainPipeline:
    return pipeline(Small("cpu") if model is None else model, import_weights=True, **more)


def _table(model: Small, table: str) -> Tensor:
    weight: Tensor = model.bags.embedding_bags[table].weight
    return weight.detach()


def _plain() -> Plain:
    """`Small("cpu").double()` in plain torch; torchrec's collections look up in float32."""
    plain, other = Plain().double(), Small("cpu").double()
    plain.over.load_state_dict(other.over.state_dict())
    for name in FEATURES:
        plain.tables[name].weight.data.copy_(_table(other, f"t_{name}"))
    return plain


def _trained_plainly(steps: Iterable[tuple[Any, ...]]) -> dict[str, Tensor]:
    """Rows after the steps; the loss of a step is the mean over its batches."""
    plain = _plain()
    dense = torch.optim.Adam(plain.over.parameters(), lr=0.01)
    embedding = torch.optim.Adagrad(plain.tables.parameters(), lr=RATE, eps=1e-10)
    for step in steps:
        dense.zero_grad()
        embedding.zero_grad()
        torch.stack([plain(batch)[0] for batch in step]).mean().backward()
        dense.step()
        embedding.step()
    return {f"t_{name}": plain.tables[name].weight.detach() for name in FEATURES}


def test_weights_of_collections_are_initial_rows_as_in_plain_torch() -> None:
    data = batches(6, dtype=torch.float64)
    states = []
    for cache_rows in (0, 100):
        with _import(Small("cpu").double(), rows=Adagrad(RATE), cache_rows=cache_rows) as trained:
            progress_all(trained, iter(data))
            states.append(state_of(trained))
    assert_same(*states)
    for table, weight in _trained_plainly((batch,) for batch in data).items():
        torch.testing.assert_close(states[0][table], weight, rtol=0, atol=1e-12)


def test_weights_that_an_init_fn_has_made_are_imported() -> None:
    model = Small("cpu")
    for config in model.bags.embedding_bag_configs():
        config.init_fn = partial(torch.nn.init.normal_, std=3.0)
    model.bags.reset_parameters()
    before = {table: _table(model, table).clone() for table in TABLES}
    with _import(model) as trained:
        assert_same({table: trained.rows(table)[:] for table in TABLES}, before)
    assert max(float(weights.abs().max()) for weights in before.values()) > 2


def test_collections_with_weights_are_refused_without_import_weights() -> None:
    with pytest.raises(
        InputError, match=r"\['t_f0', 't_f1', 't_f2'\] hold weights on cpu.*or pass import_weights=True"
    ):
        pipeline(Small("cpu"))
    with pytest.raises(InputError, match="would replace the rows"):
        _import(existing="rows-only")


def test_loaded_rows_are_there_before_the_first_batch_and_score() -> None:
    plain = Small("cpu")
    with pipeline() as trained:
        for table in TABLES:
            trained.load_rows(table, None, _table(plain, table))
        trained.load_rows("t_f1", [5, 3], torch.zeros(2, DIM))  # a later load replaces rows of an earlier one
        _table(plain, "t_f1")[[3, 5]] = 0
        trained.model.over.load_state_dict(plain.over.state_dict())
        for scores, batch in zip(trained.evaluate(batches(3, seed=4)), batches(3, seed=4), strict=True):
            torch.testing.assert_close(scores, plain(batch)[1], rtol=1e-6, atol=1e-6)
        assert torch.equal(trained.rows("t_f1")[torch.arange(ROWS)], _table(plain, "t_f1"))
        progress_all(trained, iter(batches(2)))
    with pipeline() as trained:
        trained.load_rows("t_f1", torch.tensor([7]), _weights()[:1])
        assert torch.equal(trained.rows("t_f1")[[7]], _weights()[:1])  # reading writes them too
        assert trained.rows("t_f1").ids().tolist() == [7]


@pytest.mark.parametrize("row_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [Adagrad(RATE), {"t_f0": Frozen(), "t_f1": RowWiseAdagrad(0.1), "*": SGD(0.1)}])
def test_an_export_with_its_state_goes_on_bit_for_bit(tmp_path: Path, rows: Any, row_dtype: str) -> None:
    settings: dict[str, Any] = {"rows": rows, "row_dtype": row_dtype, "rounding": "nearest"}
    with pipeline(**settings) as trained:
        trained.load_rows("t_f0", None, _weights())
        iterator = iter(batches(8))
        for _ in range(4):
            trained.progress(iterator)
        trained.export(tmp_path / "out")
        half = trained.state_dict()
        progress_all(trained, iterator)
        expected = state_of(trained)
    with pipeline(**settings) as again:
        found = again.load_rows_from(
            tmp_path / "out" / "model.safetensors", state=tmp_path / "out" / "optimizer.safetensors"
        )
        assert sorted(found) == TABLES
        again.model.load_state_dict(half["model"])
        again.optimizer.load_state_dict(half["optimizer"])
        progress_all(again, iter(batches(8)[4:]))
        assert_same(state_of(again), expected)


def test_rows_of_another_namespace_come_with_their_state() -> None:
    with pipeline(store="memory://loading", namespace="first") as trained:
        progress_all(trained, iter(batches(4)))
    states = []
    for namespace, existing in (("second", "refuse"), ("first", "rows-only")):
        with pipeline(store="memory://loading", namespace=namespace, existing=existing) as trained:
            if namespace == "second":
                trained.load_rows_of("first")
            progress_all(trained, iter(batches(3, seed=1)))
            states.append(state_of(trained))
    assert_same(*states)
    with pipeline(store="memory://loading", namespace="third", rows=SGD(0.1)) as trained:
        trained.load_rows_of("first")
        with pytest.raises(InputError, match="optimizer 'adagrad', this job has 'sgd'"):
            trained.progress(iter(batches(1)))
    with pipeline() as trained:
        with pytest.raises(InputError, match="is that of the pipeline"):
            trained.load_rows_of("bagpipe")
        trained.load_rows_of("nothing")
        with pytest.raises(InputError, match="namespace 'nothing' has no rows to load"):
            trained.progress(iter(batches(1)))
    with pytest.raises(InputError, match="give store=URL"):
        pipeline(store=None).load_rows_of("first")


def test_the_first_checkpoint_holds_loaded_rows_and_a_resume_leaves_them_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def opened(**more: Any) -> bagpipe.TrainPipeline:
        # A store of its own each time: rows come back from the checkpoint alone.
        made = _import(checkpoint_dir=str(tmp_path), checkpoint_every=3, **more)
        made.load_rows("t_f2", [1], torch.ones(1, DIM))
        return made

    data = batches(8)
    with _import() as whole:
        whole.load_rows("t_f2", [1], torch.ones(1, DIM))
        progress_all(whole, iter(data))
        expected = state_of(whole)
    with opened() as trained:
        iterator = iter(data)
        for _ in range(5):
            trained.progress(iterator)
    newest = CheckpointFolder(tmp_path).newest(pytest.fail)
    assert newest is not None
    assert newest.manifest.row_sums
    check_row_sums(newest.folder, newest.manifest)
    assert "left out" not in capsys.readouterr().err
    with opened() as resumed:
        assert resumed.step == 5
        resumed.load_rows("t_f2", [2], torch.ones(1, DIM))
        list(resumed.train(data))
        assert_same(state_of(resumed), expected)
    assert "rows to load are left out: the job goes on from step 5 with rows of its own" in capsys.readouterr().err


def test_rows_are_loaded_before_training_only() -> None:
    with pipeline(store="memory://before") as trained:
        trained.progress(iterator := iter(batches(2)))
        with pytest.raises(
            InputError, match="rows are loaded before the first batch and evaluation, got some at step 1"
        ):
            trained.load_rows("t_f0", [1], torch.ones(1, DIM))
        progress_all(trained, iterator)
        before = state_of(trained)
    with pipeline(store="memory://before", existing="rows-only") as trained:
        trained.load_rows("t_f0", [1], torch.ones(1, DIM))
        with pytest.raises(InputError, match='load none, or set existing="reset"'):
            trained.progress(iter(batches(1)))
    with pipeline(store="memory://before", existing="rows-only") as trained:
        assert torch.equal(trained.rows("t_f0")[torch.arange(ROWS)], before["t_f0"])


def test_a_state_of_a_later_step_leaves_them_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pipeline(store="memory://later") as trained:
        progress_all(trained, iter(batches(2)))
        state, rows = trained.state_dict(), state_of(trained)
    with pipeline(store="memory://later", existing="rows-only") as trained:
        trained.load_rows("t_f0", None, _weights())
        trained.load_state_dict(state)
        assert_same(state_of(trained), rows)
    assert "rows to load are left out: the job goes on from step 2" in capsys.readouterr().err


def one_rank(membership: Membership, settings: dict[str, Any]) -> dict[str, Any]:
    """A rank, told of the others as torchrun tells it."""
    torch.set_num_threads(1)
    join(membership)
    out = Path(settings.pop("out"))
    with _import(Small("cpu").double(), **settings) as trained:
        assert trained.rows("t_f0")[[1]].shape == (1, DIM)
        first = [scores.tolist() for scores in trained.evaluate(batches(2, seed=9, dtype=torch.float64))]
        iterator = iter(batches(4, seed=10 + membership.rank, dtype=torch.float64))
        trained.progress(iterator)
        trained.export(out)
        with pytest.raises(InputError, match="out is not empty"):  # on every rank
            trained.export(out)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))  # as on a full disk
        with pytest.raises(JobError if membership.rank == 0 else InputError, match=r"cannot write .*File too large"):
            trained.export(out.with_name("large"))
        progress_all(trained, iterator)
        return {"scores": first, "rows": {table: trained.rows(table)[torch.arange(ROWS)].numpy() for table in TABLES}}


@pytest.mark.redis
@pytest.mark.multiproc
def test_on_two_ranks_the_first_writes_for_all(redis_server: Any, namespace: str, tmp_path: Path) -> None:
    settings = {"store": redis_server.url, "namespace": namespace, "out": str(tmp_path / "out"), "rows": Adagrad(RATE)}
    ends = run_ranks(2, one_rank, settings)
    assert [end.error for end in ends] == [None, None]
    for scores, batch in zip(ends[1].value["scores"], batches(2, seed=9, dtype=torch.float64), strict=True):
        torch.testing.assert_close(torch.tensor(scores, dtype=torch.float64), _plain()(batch)[1], rtol=0, atol=1e-12)
    by_rank = [batches(4, seed=10 + rank, dtype=torch.float64) for rank in range(2)]
    expected = _trained_plainly(zip(*by_rank, strict=True))
    for end in ends:
        for table, weight in expected.items():
            torch.testing.assert_close(torch.from_numpy(end.value["rows"][table]), weight, rtol=0, atol=1e-12)
