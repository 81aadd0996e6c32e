"""The dense part of a source against that of a new job."""

from __future__ import annotations

import torch

from bagpipe.checkpoint.dense_state import DenseState
from bagpipe.start_from.dense import JobDense, first_state, match_dense

#: ``w`` and ``b`` are parameters, ``n`` is a buffer.
THEIRS = DenseState(
    tensors={
        "model.w": torch.tensor([1.0, 2.0]), "model.b": torch.tensor([3.0]), "model.n": torch.tensor(7),
        "model.old": torch.zeros(2), "optim.w.step": torch.tensor(9.0), "optim.w.exp_avg": torch.tensor([4.0, 5.0]),
        "optim.b.step": torch.tensor(9.0), "optim.b.exp_avg": torch.tensor([6.0]), "part.average.w": torch.ones(2),
        "rng.cpu": torch.arange(4, dtype=torch.uint8),
    },
)  # fmt: skip


def job(optimizer: str = "adam", *, averages: bool = True, **tensors: torch.Tensor) -> JobDense:
    own = {"w": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(2), "n": torch.tensor(0), "fresh": torch.ones(1)}
    initial = DenseState(tensors={f"model.{name}": value for name, value in {**own, **tensors}.items()})
    return JobDense(
        initial=initial, trainable=("w", "b", "fresh"), optimizer=optimizer, keeps_state=True, has_averages=averages
    )


def fates(ours: JobDense, optimizer: str = "adam", without: tuple[str, ...] = ()) -> dict[str, tuple[str, str]]:
    _, items = match_dense(THEIRS, ours, optimizer, without)
    return {item.label: (item.fate.value, item.state) for item in items}


def test_each_parameter_and_state_is_taken_new_dropped_or_does_not_fit() -> None:
    expected = {
        "dense.w": ("taken", "taken"), "dense.b": ("does not fit", ""), "dense.n": ("taken", ""),
        "dense.fresh": ("new", "new"), "dense.old": ("dropped", ""), "job.average": ("taken", ""),
    }  # fmt: skip
    assert fates(job()) == expected
    assert fates(job(), without=("dense.b",)) == {**expected, "dense.b": ("new", "new")}
    assert fates(job(), without=("state.*",))["dense.w"] == ("taken", "adam: dropped, adam: new")
    assert fates(job("lamb"))["dense.w"] == ("taken", "adam: dropped, lamb: new")
    assert fates(job(averages=False))["job.average"] == ("dropped", "")
    assert fates(job(n=torch.tensor(0.0)))["dense.n"] == ("does not fit", "")


def test_the_first_state_is_what_was_decided() -> None:
    ours = job()
    plan, _ = match_dense(THEIRS, ours, "adam", ("dense.b",))
    state = first_state(plan, THEIRS, ours, takes_random=True)
    taken = torch.tensor([1.0, 2.0], dtype=torch.float64)
    moments = torch.tensor([4.0, 5.0], dtype=torch.float64)
    expected = {
        "model.w": taken, "model.b": torch.zeros(2), "model.n": torch.tensor(7), "model.fresh": torch.ones(1),
        "optim.w.step": torch.tensor(9.0), "optim.w.exp_avg": moments, "rng.cpu": THEIRS.tensors["rng.cpu"],
        "part.average.w": torch.ones(2, dtype=torch.float64), "part.average.b": torch.zeros(2),
        "part.average.fresh": torch.ones(1),
    }  # fmt: skip
    assert state.tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert state.tensors[name].dtype == value.dtype, name
        assert torch.equal(state.tensors[name], value), name
    assert "rng.cpu" not in first_state(plan, THEIRS, ours, takes_random=False).tensors
