"""Checkpoints of a pipeline: by hand, periodic and at the end; resumed runs are those that nothing interrupted."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import lr_scheduler
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import bagpipe
from bagpipe.errors import InputError
from tests.train_pipeline.small import Small, assert_same, batches, pipeline, progress_all, state_of

ALL = batches(14)
_NAMES = itertools.count()


@pytest.fixture
def where(tmp_path: Path) -> dict[str, Any]:
    """A store in memory that outlives a pipeline, and a folder for checkpoints."""
    return {"store": f"memory://saving-{next(_NAMES)}", "checkpoint_dir": str(tmp_path / "checkpoints")}


def _whole(num: int = 14) -> dict[str, torch.Tensor]:
    with pipeline() as trained:
        progress_all(trained, iter(ALL[:num]))
        return state_of(trained)


class _Stop(Exception):
    """Ends a job in the middle."""


class _StopsAt(Small):
    """Fails in the forward of one batch."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.left = batch

    def forward(self, batch: Any) -> Any:
        if self.left == 0:
            raise _Stop
        self.left -= 1
        return super().forward(batch)


@pytest.mark.parametrize("cache_rows", [0, 120])
@pytest.mark.parametrize("fails_at", [4, 8, 13])
def test_a_job_that_failed_resumes_from_its_periodic_checkpoint(
    where: dict[str, Any], cache_rows: int, fails_at: int
) -> None:
    with pipeline(_StopsAt(fails_at), checkpoint_every=3, cache_rows=cache_rows, **where) as trained:
        with pytest.raises(_Stop):
            list(trained.train(ALL))
    with pipeline(checkpoint_every=3, cache_rows=cache_rows, **where) as trained:
        list(trained.train(ALL))
        assert trained.step == 14
        assert_same(state_of(trained), _whole())


def test_a_checkpoint_by_hand_holds_the_batches_trained_so_far(where: dict[str, Any]) -> None:
    folder = where.pop("checkpoint_dir")
    with pipeline(_StopsAt(9), **where, checkpoint_dir=folder) as trained:
        iterator = iter(ALL)
        for step in range(9):
            if step == 5:
                trained.save()
            trained.progress(iterator)
        with pytest.raises(_Stop):
            trained.progress(iterator)
    with pipeline(**where) as again:
        assert again.restore(folder) == again.position == 5
        list(again.train(ALL))
        assert_same(state_of(again), _whole())


def test_closing_in_the_middle_leaves_a_checkpoint(where: dict[str, Any]) -> None:
    with pipeline(**where) as trained:
        for _ in itertools.islice(trained.train(ALL), 6):
            pass
    with pipeline(**where) as trained:
        rest = trained.train(ALL)
        assert len(list(rest)) == 8
        assert_same(state_of(trained), _whole())


def test_epochs_are_counted_and_a_finished_one_is_not_repeated(where: dict[str, Any]) -> None:
    with pipeline(**where) as trained:
        list(trained.train(ALL[:6]))
        assert (trained.epoch, trained.position, trained.step) == (1, 0, 6)
    with pipeline(**where) as trained:
        assert (trained.epoch, trained.position, trained.step) == (1, 0, 6)
        list(trained.train(ALL[6:]))
        assert_same(state_of(trained), _whole())


def test_a_tracked_scheduler_goes_on_where_it_was(where: dict[str, Any]) -> None:
    def trained_with_rates(trained: bagpipe.TrainPipeline, stop: int = 99) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(trained.optimizer, 3, gamma=0.5)
        trained.track("scheduler", scheduler)
        for _ in trained.train(ALL):
            scheduler.step()
            if trained.step == stop:
                return

    with pipeline(**where) as trained:
        trained_with_rates(trained, stop=7)
    with pipeline(**where) as trained:
        trained_with_rates(trained)
        resumed = state_of(trained)
    with pipeline() as trained:
        trained_with_rates(trained)
        assert_same(resumed, state_of(trained))


_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambdas": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5**step]),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=[1.0, 0.3], total_steps=20),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, min_lr=[0.1, 0.001]),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


def _epochs(scheduler: str, num: int, *, saves: bool = False, model: Small | None = None, **more: Any) -> Any:
    """Epochs of four batches, with a step of a scheduler after each; rates of every batch, and the state."""
    model = model or Small()
    groups = [{"params": model.bags.parameters(), "lr": 1.0}, {"params": model.over.parameters()}]
    made = _SCHEDULERS[scheduler](torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    optimizer = made.optimizer
    rates = []
    with pipeline(model, optimizer=optimizer, **more) as trained:
        trained.track("scheduler", made)
        for _ in range(trained.epoch, num):
            for _ in trained.train(ALL[:4]):
                rates.append([group["lr"] for group in optimizer.param_groups])
            made.step(1.0) if scheduler == "plateau" else made.step()
            if saves:
                trained.save()
        return rates, state_of(trained)


@pytest.mark.parametrize(
    ("scheduler", "saves"),
    [("lambdas", True), ("lambdas", False), ("one cycle", False), ("plateau", True), ("chained", True)],
)
def test_a_step_of_a_scheduler_between_two_epochs_is_in_the_checkpoint(
    where: dict[str, Any], scheduler: str, saves: bool
) -> None:
    """The checkpoint of the epoch's end was made before the step. Two groups, that of the tables is empty."""
    rates, state = _epochs(scheduler, 4)
    first, _ = _epochs(scheduler, 2, saves=saves, **where)
    rest, resumed = _epochs(scheduler, 4, saves=saves, **where)
    assert first + rest == rates
    assert_same(resumed, state)


def test_a_job_that_failed_in_the_next_epoch_resumes_with_the_step_of_the_scheduler(where: dict[str, Any]) -> None:
    rates, state = _epochs("lambdas", 3)
    with pytest.raises(_Stop):
        _epochs("lambdas", 3, model=_StopsAt(6), **where)
    rest, resumed = _epochs("lambdas", 3, **where)
    assert rest == rates[4:]
    assert_same(resumed, state)


@pytest.mark.parametrize("in_epoch", [0, 2])
def test_a_checkpoint_by_hand_has_what_was_changed_by_hand(where: dict[str, Any], in_epoch: int) -> None:
    """Weights and optimizer state are loaded after a checkpoint of the same batch, between two epochs or in one."""
    states = []
    for resumes in (False, True):
        more = where if resumes else {}
        with pipeline(**more) as trained:
            list(trained.train(ALL[:3]))
            weights, optimizer = copy.deepcopy((trained.dense_state_dict(), trained.optimizer.state_dict()))
            iterator = iter(ALL[3:] if in_epoch else ALL[3:10])
            for _ in range(in_epoch):
                trained.progress(iterator)
            if not in_epoch:
                progress_all(trained, iterator)
            if resumes:
                trained.save()
            trained.model.load_state_dict(weights, strict=False)
            trained.optimizer.load_state_dict(optimizer)
            if resumes:
                trained.save()
            else:
                progress_all(trained, iterator if in_epoch else iter(ALL[10:]))
                states.append(state_of(trained))
    with pipeline(**where) as trained:
        list(trained.train(ALL[3:] if in_epoch else ALL[10:]))
        states.append(state_of(trained))
    assert_same(*states)


def test_batches_whose_iterator_was_given_up_can_be_saved(where: dict[str, Any]) -> None:
    with pipeline(_StopsAt(6), **where) as trained:
        iterator = iter(ALL)
        for _ in range(5):
            trained.progress(iterator)
        trained.reset()
        trained.save()
        with pytest.raises(_Stop):
            list(trained.train(ALL[5:]))
    with pipeline(**where) as trained:
        assert (trained.step, trained.epoch) == (5, 1)
        list(trained.train(ALL[5:]))
        assert_same(state_of(trained), _whole())


class _Batches(Dataset[Any]):
    def __getitem__(self, number: int) -> Any:
        return ALL[number]

    def __len__(self) -> int:
        return len(ALL)


def _loader() -> Any:
    generator = torch.Generator().manual_seed(3)
    return StatefulDataLoader(_Batches(), batch_size=None, shuffle=True, generator=generator)


def test_a_stateful_loader_goes_on_from_its_state(where: dict[str, Any]) -> None:
    with pipeline(**where) as trained:
        for _ in itertools.islice(trained.train(_loader()), 5):
            pass
    with pipeline(**where) as trained:
        assert len(list(trained.train(_loader()))) == 9
        resumed = state_of(trained)
    with pipeline() as trained:
        list(trained.train(_loader()))
        assert_same(resumed, state_of(trained))


def test_other_batches_after_a_resume_are_detected(where: dict[str, Any]) -> None:
    with pipeline(**where) as trained:
        for _ in itertools.islice(trained.train(ALL), 5):
            pass
    other = [*ALL[:5], ALL[6], ALL[5], *ALL[7:]]
    with pipeline(**where) as trained, pytest.raises(InputError, match=r"batch 5 .* hash \w{16}, expected \w{16}"):
        list(trained.train(other))


def test_a_shorter_loader_after_a_resume_is_named(where: dict[str, Any]) -> None:
    with pipeline(**where) as trained:
        for _ in itertools.islice(trained.train(ALL), 5):
            pass
    with pipeline(**where) as trained, pytest.raises(InputError, match=r"with the 5 batches .* got 3"):
        list(trained.train(ALL[:3]))


def test_a_state_dict_goes_on_with_the_rows_of_the_store(where: dict[str, Any]) -> None:
    del where["checkpoint_dir"]
    with pipeline(**where) as trained:
        for _ in itertools.islice(trained.train(ALL), 5):
            pass
        state = trained.state_dict()
    with pipeline(**where, existing="rows-only") as trained:
        trained.load_state_dict(state)
        assert (trained.step, trained.position) == (5, 5)
        list(trained.train(ALL))
        assert_same(state_of(trained), _whole())


def test_folders_that_do_not_fit_are_refused(where: dict[str, Any], tmp_path: Path) -> None:
    with pipeline(**where) as trained, pytest.raises(InputError, match="checkpoints of this pipeline are in"):
        trained.save(str(tmp_path / "other"))
    with pipeline() as trained:
        with pytest.raises(InputError, match="save needs a folder"):
            trained.save()
        trained.progress(iter(ALL))
        with pytest.raises(InputError, match="training has begun without checkpoints"):
            trained.save(str(tmp_path / "late"))
    with pipeline() as trained, pytest.raises(InputError, match="holds no checkpoint of a trained batch"):
        trained.restore(str(tmp_path / "empty"))


_KILLED = """
import os, signal, sys
from tests.train_pipeline.small import batches, pipeline
settings = dict(zip(("store", "namespace", "checkpoint_dir"), sys.argv[1:]))
with pipeline(**settings, checkpoint_every=4, planner="process") as trained:
    for _ in trained.train(batches(14)):
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
    with pipeline(store=redis_server.url, namespace=namespace, checkpoint_dir=folder, checkpoint_every=4) as trained:
        rest: Iterator[Any] = trained.train(ALL)
        assert 14 - len(list(rest)) in (0, 4, 8)  # the last checkpoint that was published
        assert_same(state_of(trained), _whole())


def test_a_job_goes_on_from_the_checkpoints_of_another(where: dict[str, Any], tmp_path: Path) -> None:
    """Its first epoch is the second half of one job over both."""
    with pipeline(**where) as trained:
        progress_all(trained, iter(ALL[:6]))
        trained.save()
    first = where.pop("checkpoint_dir")
    where["namespace"] = "second"
    with pipeline(**where, checkpoint_dir=str(tmp_path / "second"), start_from=first) as trained:
        assert trained.step == 0
        progress_all(trained, iter(ALL[6:]))
        assert trained.step == 8
        assert_same(state_of(trained), _whole())
    where["namespace"] = "third"
    anew = {"start_from": first, "start_without": ["dense.*", "rows.*", "state.*", "job.*"]}
    with (
        pytest.raises(InputError, match=r"start_from .* has nothing that fits this job"),
        pipeline(**where, checkpoint_dir=str(tmp_path / "third"), **anew) as trained,
    ):
        progress_all(trained, iter(ALL[:1]))
    with pytest.raises(InputError, match=r"start_without rows.a needs start_from"):
        pipeline(start_without=["rows.a"])
    with pytest.raises(InputError, match=r"start_from x needs checkpoint_dir, the new job's folder"):
        pipeline(start_from="x")


@pytest.mark.parametrize("source", ["checkpoint", "files"])
def test_rows_of_a_checkpoint_are_there_before_the_first_batch(source: str, tmp_path: Path) -> None:
    """In a store of its own that is still empty: evaluations, reads and exports do not see initial rows."""
    held_out = batches(2, seed=9)
    folder = str(tmp_path / "job")
    with pipeline(checkpoint_dir=folder) as trained:
        iterator = iter(batches(6))
        for _ in range(3):
            trained.progress(iterator)
        trained.save()
        trained.export(tmp_path / "weights")
        state, scores = state_of(trained), list(trained.evaluate(held_out))
        progress_all(trained, iterator)
        ended = state_of(trained)
    start: dict[str, Any] = {"checkpoint_dir": folder, "resume": "3"}
    if source == "files":
        files = tmp_path / "weights" / "model.safetensors"
        start = {"checkpoint_dir": str(tmp_path / "next"), "start_from": files}
    for use in ("evaluate", "rows", "export"):
        with pipeline(**start) as again:
            if use == "evaluate":
                assert torch.equal(torch.cat(list(again.evaluate(held_out))), torch.cat(scores))
            if use == "rows":
                assert_same(state_of(again), state)
            if use == "export":
                again.export(tmp_path / use / source)
                weights = load_file(tmp_path / use / source / "model.safetensors")
                assert torch.equal(weights["bags.embedding_bags.t_f0.weight"], state["t_f0"])
            if source == "checkpoint":
                progress_all(again, iter(batches(6)[3:]))
                assert_same(state_of(again), ended)
