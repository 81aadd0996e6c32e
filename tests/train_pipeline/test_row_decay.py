"""Rows that decay, at rest: `rows`, exports, evaluations and resumed jobs show them as of the last batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import bagpipe
from bagpipe.errors import InputError
from bagpipe.start_from.open_source import open_source
from tests.system.plain_rows import PlainRows
from tests.train_pipeline.small import FEATURES, ROWS, Plain, Small, assert_same, batches, pipeline, state_of


def _rate(step: int) -> float:
    return 0.05 / (1 + step)


DECAYING = bagpipe.optim.AdamW(_rate, weight_decay=4.0)
KINDS = (DECAYING, bagpipe.optim.Adam(_rate, weight_decay=4.0, decoupled=False))


def _eager(
    num_batches: int, *, decoupled: bool, initial: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Tables of a plain loop in float64 whose rows all decay at every batch."""
    plain = Plain().double()
    for name, weights in (initial or {}).items():
        plain.tables[name].weight.data.copy_(weights)
    for name in FEATURES:
        plain.tables[name].sparse = True
    weights = [plain.tables[name].weight for name in FEATURES]
    rows = PlainRows(weights, name="adam", lr=1.0, eps=1e-8, decay=4.0, decoupled=decoupled)
    dense = torch.optim.Adam(plain.over.parameters(), lr=0.01)
    for number, batch in enumerate(batches(num_batches)):
        plain.zero_grad()
        plain(batch)[0].backward()
        rows.param_groups[0]["lr"] = 0.05 / (1 + number)
        rows.step()
        dense.step()
    return {name: plain.tables[name].weight.detach() for name in FEATURES}


def _train(pipe: bagpipe.TrainPipeline, num_batches: int) -> None:
    iterator = iter(batches(9))
    for _ in range(num_batches):
        pipe.progress(iterator)


@pytest.mark.parametrize("rows", KINDS, ids=lambda rows: rows.record)
def test_rows_at_rest_are_those_of_an_eager_loop(rows: bagpipe.optim.RowOptimizer, tmp_path: Path) -> None:
    """Rows that were never used decay from the first batch on."""
    with pipeline(rows=rows) as trained:
        _train(trained, 7)
        shown = {name: trained.rows(f"t_{name}")[:ROWS] for name in FEATURES}
        scores = [each.clone() for each in trained.evaluate(batches(2, seed=8))]
        trained.export(tmp_path / "out")
    for name, expected in _eager(7, decoupled=rows is DECAYING).items():
        torch.testing.assert_close(shown[name].double(), expected, rtol=1e-4, atol=1e-6)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(exported[f"bags.embedding_bags.t_{name}.weight"], shown[name]) for name in FEATURES)
    assert not any("step" in name for name in load_file(tmp_path / "out" / "optimizer.safetensors") if "t_f" in name)
    plain = Small("cpu")
    plain.load_state_dict(exported)
    with torch.no_grad():
        for batch, ours in zip(batches(2, seed=8), scores, strict=True):
            torch.testing.assert_close(plain(batch)[1], ours, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", KINDS, ids=lambda rows: rows.record)
@pytest.mark.parametrize("way", ["weights of the model", "tensors", "file"])
def test_rows_to_begin_with_decay_from_the_first_batch(
    rows: bagpipe.optim.RowOptimizer, way: str, tmp_path: Path
) -> None:
    model = Small("cpu")
    initial = {name: model.bags.embedding_bags[f"t_{name}"].weight.detach().clone() for name in FEATURES}
    is_imported = way == "weights of the model"
    with pipeline(model if is_imported else Small(), rows=rows, import_weights=is_imported) as trained:
        if way == "file":
            path = tmp_path / "model.safetensors"
            save_file({f"embeddings.t_{name}.weight": weights for name, weights in initial.items()}, path)
            trained.load_rows_from(path)
        for name, weights in initial.items() if way == "tensors" else ():
            trained.load_rows(f"t_{name}", None, weights)
        trained.model.over.load_state_dict(Small().over.state_dict())
        _train(trained, 5)
        shown = {name: trained.rows(f"t_{name}")[:ROWS] for name in FEATURES}
    for name, expected in _eager(5, decoupled=rows is DECAYING, initial=initial).items():
        torch.testing.assert_close(shown[name].double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", KINDS, ids=lambda rows: rows.record)
def test_looking_at_rows_changes_nothing_and_a_resumed_job_goes_on(
    rows: bagpipe.optim.RowOptimizer, tmp_path: Path
) -> None:
    with pipeline(rows=rows) as whole:
        _train(whole, 9)
        expected = state_of(whole)
    where: dict[str, Any] = {"store": f"memory://decay-{rows.record}", "checkpoint_dir": str(tmp_path / "checkpoints")}
    with pipeline(rows=rows, checkpoint_every=2, **where) as first:
        iterator = iter(batches(9))
        for _ in range(5):
            first.progress(iterator)
            first.rows("t_f0")[:ROWS]
        first.save()
        before = state_of(first)
    table = open_source(where["checkpoint_dir"]).tables["t_f0"]  # what a new job takes
    for chunk in table.chunks():
        assert torch.equal(chunk.weights, before["t_f0"][torch.from_numpy(chunk.ids)])
        assert chunk.state is not None
        assert (table.optimizer, chunk.state.shape[1]) == ("adam", 2 * chunk.weights.shape[1])
    with pipeline(rows=rows, **where) as resumed:
        list(resumed.train(batches(9)))
        assert_same(state_of(resumed), expected)
    assert not torch.equal(before["t_f0"], expected["t_f0"])


def test_rows_at_steps_of_another_job_are_refused() -> None:
    with pipeline(rows=DECAYING, store="memory://others", existing="rows-only") as trained:
        with pytest.raises(InputError, match=r"rows that decay need .*existing refuse or reset"):
            _train(trained, 1)
    with pipeline(rows={"t_f1": DECAYING, "*": bagpipe.optim.SGD(0.1)}, store="memory://others") as trained:
        with pytest.raises(InputError, match=r"table 't_f1' decay, and those of namespace 'x' are at steps of another"):
            trained.load_rows_of("x")
