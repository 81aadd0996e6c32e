"""Jobs with optimizers, rates, limits and losses of a plain loop: equal to it, to direct mode, on ranks, in stages."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from bagpipe.config.sections import Config
from bagpipe.errors import InputError
from bagpipe.store.server.embedded import EmbeddedServer
from tests.effort import some_of
from tests.system.jobs import JobOutcome, change, largest_batch, run_job
from tests.system.plain_jobs import plain_job
from tests.system.plain_rows import PlainRows
from tests.system.programs import run_forked
from tests.system.rank_threads import run_ranks
from tests.system.reference import MakeScheduler, row_state
from tests.system.resumed import JOB, Resumed, digests
from tests.system.staging import assert_equal_numbers, run_staged, staged
from tests.system.test_exactness import MakeConfig
from tests.system.test_plain_loop import assert_same


@pytest.fixture(autouse=True)
def _checked_sparse_tensors() -> Iterator[None]:
    """Silences torch's one-time warning about sparse tensor checks that are neither on nor off."""
    with torch.sparse.check_sparse_tensor_invariants(True):  # type: ignore[no-untyped-call]
        yield


def check_ranks(config: Config, alone: JobOutcome) -> None:
    together = run_ranks(config, 2)
    for name, (ids, rows) in alone.rows.items():
        assert together.rows[name][0].tolist() == ids.tolist()
        np.testing.assert_allclose(together.rows[name][1], rows, rtol=1e-12, atol=1e-12)
    for name, value in alone.dense.items():
        torch.testing.assert_close(together.dense[name], value, rtol=1e-12, atol=1e-12)


def check(config: Config, *, ranks: bool = True, **plain: Any) -> JobOutcome:
    """Direct mode equals the plain loop; a cache changes no bit; two ranks change the order of sums only."""
    direct = run_job(change(config, cache__rows=0))
    assert_same(direct, plain_job(config, **plain), config)
    cached = run_job(change(config, cache__rows=largest_batch(config), oracle__lookahead=8))
    assert (cached.digests, cached.losses) == (direct.digests, direct.losses)
    if ranks:
        check_ranks(change(config, cache__rows=150), direct)
    return direct


# ---- schedules -------------------------------------------------------------------------------------------------------


def warmed_up(make: MakeScheduler, steps: int, start: float) -> MakeScheduler:
    def both(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        ramp = lr_scheduler.LinearLR(optimizer, start_factor=start, total_iters=steps)
        return lr_scheduler.SequentialLR(optimizer, [ramp, make(optimizer)], [steps])

    return both


def cosine(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CosineAnnealingLR(optimizer, 40)


#: 16 batches. Keys, and the schedulers of rows and dense part.
SCHEDULES: dict[str, tuple[dict[str, object], tuple[MakeScheduler | None, MakeScheduler | None]]] = {
    "warm-up and cosine": (
        {"schedule": "cosine", "schedule_length": 40, "warmup_steps": 5, "warmup_start": 0.1},
        (warmed_up(cosine, 5, 0.1), warmed_up(cosine, 5, 0.1)),
    ),
    "rows constant": (
        {"schedule": "cosine", "schedule_length": 40, "rows_schedule": "constant"},
        (None, cosine),
    ),
    "rows of their own": (
        {"rows_schedule": "step", "rows_warmup_steps": 4, "schedule_milestones": (3, 9), "warmup_start": 0.5},
        (warmed_up(lambda o: lr_scheduler.MultiStepLR(o, [3, 9]), 4, 0.5), None),
    ),
}


OPTIMIZERS = [("sgd", "adam"), ("adam", "sgd"), ("adagrad", "adagrad")]


@pytest.mark.parametrize(
    ("name", "optimizer", "dense"),
    some_of([(name, *pair) for name in SCHEDULES for pair in OPTIMIZERS], range(0, 9, 4)),
)
def test_schedules_equal_torch_in_a_plain_loop(name: str, optimizer: str, dense: str, clicks: MakeConfig) -> None:
    keys, schedulers = SCHEDULES[name]
    job = clicks("sum", "dlrm", optimizer, limit=185)
    config = change(job, run__dtype="float64", optim__dense=dense)
    config = change(config, **{f"optim__{key}": value for key, value in keys.items()})
    scheduled = check(config, schedulers=schedulers)
    assert scheduled.digests != run_job(change(job, run__dtype="float64")).digests


def test_a_schedule_by_epochs_equals_torch_in_a_plain_loop(clicks: MakeConfig) -> None:
    config = change(
        clicks(epochs=3, limit=100),
        run__dtype="float64",
        optim__schedule="exponential",
        optim__schedule_every=1,
        optim__schedule_factor=0.25,
        optim__schedule_unit="epoch",
    )

    def by_epoch(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.StepLR(optimizer, 9, gamma=0.25)  # batches of an epoch

    check(config, schedulers=(by_epoch, by_epoch))


@pytest.mark.parametrize("world_size", [1, 2])
def test_stages_follow_the_schedule(world_size: int, clicks: MakeConfig) -> None:
    config = change(
        clicks("mixed", "deepfm", limit=120),
        run__dtype="float64",
        optim__schedule="polynomial",
        optim__schedule_length=8,
        optim__warmup_steps=3,
    )
    assert_equal_numbers(run_staged(staged(config, "1f1b", 2), world_size), run_staged(config))


# ---- dense optimizers ------------------------------------------------------------------------------------------------


class PlainLamb(torch.optim.Optimizer):
    """Algorithm 2 of arXiv:1904.00962."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})
        self.number = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.number += 1
        for w in self.param_groups[0]["params"]:
            state = self.state[w]
            state["step"] = torch.tensor(float(self.number))
            m = state["exp_avg"] = 0.8 * state.get("exp_avg", 0) + (1 - 0.8) * w.grad
            v = state["exp_avg_sq"] = 0.9 * state.get("exp_avg_sq", 0) + (1 - 0.9) * w.grad**2
            u = (m / (1 - 0.8**self.number)) / (torch.sqrt(v / (1 - 0.9**self.number)) + 1e-6) + 0.05 * w
            w -= 0.05 * (w.norm() / u.norm() if w.norm() and u.norm() else 1.0) * u


ADAM: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.05}
ADAM_KEYS: dict[str, object] = {"beta1": 0.8, "beta2": 0.9, "weight_decay": 0.05}
#: Keys, and the optimizer of the plain loop.
DENSE: dict[str, tuple[dict[str, object], Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]]] = {
    "sgd-momentum": (
        {"dense": "sgd", "momentum": 0.9, "weight_decay": 0.01},
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    ),
    "sgd-nesterov": (
        {"dense": "sgd", "momentum": 0.5, "nesterov": True},
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.5, nesterov=True),
    ),
    "adagrad": (
        {"dense": "adagrad", "weight_decay": 0.01},
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, eps=1e-6, weight_decay=0.01),
    ),
    "adam": ({"dense": "adam", **ADAM_KEYS}, lambda parameters: torch.optim.Adam(parameters, **ADAM)),
    "adamw": ({"dense": "adamw", **ADAM_KEYS}, lambda parameters: torch.optim.AdamW(parameters, **ADAM)),
    "lamb": ({"dense": "lamb", **ADAM_KEYS}, PlainLamb),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_optimizers_equal_a_plain_loop(name: str, clicks: MakeConfig) -> None:
    keys, make = DENSE[name]
    config = change(clicks(limit=125), run__dtype="float64", **{f"optim__{key}": value for key, value in keys.items()})
    check(config, make_dense=make)


def test_exempt_parameters_do_not_decay_in_torchs_groups(clicks: MakeConfig) -> None:
    keys = {**ADAM_KEYS, "dense": "adamw", "weight_decay": 0.5, "weight_decay_exempt": ("1d",)}
    config = change(clicks(limit=100), run__dtype="float64", **{f"optim__{key}": value for key, value in keys.items()})

    def in_groups(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        groups = [[p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]]
        assert all(groups)
        own = [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}]
        return torch.optim.AdamW(own, **{**ADAM, "weight_decay": 0.5})

    exempt = check(config, make_dense=in_groups)
    assert exempt.digests != run_job(change(config, optim__weight_decay_exempt=())).digests
    assert_equal_numbers(run_staged(staged(config, "1f1b", 2), 2), run_staged(config))


@pytest.mark.parametrize("name", some_of(["sgd-momentum", "adamw", "lamb"], {2}))
def test_dense_optimizers_of_stages(name: str, clicks: MakeConfig) -> None:
    keys, _ = DENSE[name]
    config = change(clicks(limit=100), run__dtype="float64", **{f"optim__{key}": value for key, value in keys.items()})
    assert_equal_numbers(run_staged(staged(config, "1f1b", 2), 2), run_staged(config))


# ---- row optimizers --------------------------------------------------------------------------------------------------

#: Keys, and numbers of the plain loop.
ROWS: dict[str, tuple[dict[str, object], dict[str, Any]]] = {
    "momentum": (
        {"rows_momentum": 0.7, "rows_schedule": "exponential", "schedule_every": 9},
        {"momentum": 0.7},
    ),
    "ftrl": ({"ftrl_l1": 1e-4, "ftrl_l2": 0.1, "ftrl_beta": 0.5}, {"l1": 1e-4, "l2": 0.1, "beta": 0.5}),
}


@pytest.mark.parametrize("name", ROWS)
def test_row_optimizers_equal_a_plain_loop(name: str, clicks: MakeConfig) -> None:
    keys, numbers = ROWS[name]
    config = change(clicks(limit=125), run__dtype="float64", optim__rows=name)
    config = change(config, **{f"optim__{key}": value for key, value in keys.items()})
    falling = lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.1 ** (1 / 9))  # noqa: E731
    check(
        config,
        make_rows=lambda tables: PlainRows(tables, name=name, lr=config.optim.rows_lr, eps=config.optim.eps, **numbers),
        schedulers=(falling if "rows_schedule" in keys else None, None),
    )


class ByTable(torch.optim.Optimizer):
    """An optimizer for each table."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([table for each in optimizers for table in each.param_groups[0]["params"]], {})
        self.optimizers = optimizers
        for each in optimizers:
            self.state.update(each.state)

    def step(self) -> None:  # type: ignore[override]
        for each in self.optimizers:
            each.step()


def test_tables_have_their_own_optimizer_and_rate(clicks: MakeConfig) -> None:
    config = change(
        clicks("mixed", limit=125),
        run__dtype="float64",
        optim__rows="adam",
        optim__rows_by_table=("items=adam", "topic=ftrl"),
        optim__rows_lr_by_table=("items=0.3",),
    )
    direct = run_job(change(config, cache__rows=0))
    plain = plain_job(
        config,
        make_rows=lambda tables: ByTable(
            [
                PlainRows([table], name=name, lr=lr, eps=config.optim.eps)
                for table, (name, lr) in zip(
                    tables, [("adam", config.optim.rows_lr), ("adam", 0.3), ("ftrl", config.optim.rows_lr)], strict=True
                )
            ]
        ),
    )
    names = {table.name: ("ftrl" if table.name == "topic" else "adam") for table in plain.tables.tables}
    for number, table in enumerate(plain.tables.tables):
        expected = row_state(plain, names[table.name], number).numpy()
        np.testing.assert_allclose(direct.rows[table.name][1], expected, rtol=1e-12, atol=1e-12, err_msg=table.name)
    cached = run_job(change(config, cache__rows=largest_batch(config), oracle__lookahead=8))
    assert (cached.digests, cached.losses) == (direct.digests, direct.losses)
    check_ranks(change(config, cache__rows=150), direct)


def test_a_table_that_the_model_lacks_is_refused(clicks: MakeConfig) -> None:
    with pytest.raises(InputError, match=r"the tables \['user', 'items', 'topic'\].*: unknown \['users'\]"):
        run_job(change(clicks("sum"), optim__rows_by_table=("users=sgd",)))


# ---- losses ----------------------------------------------------------------------------------------------------------


def plain_focal(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Lin et al., arXiv:1708.02002, equation 5."""
    p = torch.sigmoid(logits)
    positive = -0.4 * (1 - p) ** 1.5 * torch.log(p)
    negative = -(1 - 0.4) * p**1.5 * torch.log(1 - p)
    return torch.where(labels == 1, positive, negative).mean()


def plain_smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    targets = torch.stack([1 - labels, labels], dim=1)
    scores = torch.stack([torch.zeros_like(logits), logits], dim=1)  # two classes: torch smooths these
    return torch.nn.functional.cross_entropy(scores, targets, label_smoothing=0.2)


def plain_weighted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    p = torch.sigmoid(logits)
    return -(3.0 * labels * torch.log(p) + (1 - labels) * torch.log(1 - p)).mean()


#: Keys, and the mean loss of the plain loop.
LOSSES: dict[str, tuple[dict[str, object], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "focal": ({"loss": "focal", "focal_gamma": 1.5, "focal_alpha": 0.4}, plain_focal),
    "smoothed": ({"label_smoothing": 0.2}, plain_smoothed),
    "weighted": ({"loss": "weighted_bce", "pos_weight": 3.0}, plain_weighted),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_equal_a_plain_loop(name: str, clicks: MakeConfig) -> None:
    keys, loss = LOSSES[name]
    config = change(clicks(limit=125), run__dtype="float64", **{f"model__{key}": value for key, value in keys.items()})
    check(config, loss_of=loss)


@pytest.mark.parametrize("name", some_of([*LOSSES], {2}))
def test_losses_of_stages(name: str, clicks: MakeConfig) -> None:
    keys, _ = LOSSES[name]
    config = change(clicks(limit=60), run__dtype="float64", **{f"model__{key}": value for key, value in keys.items()})
    assert_equal_numbers(run_staged(staged(config, "1f1b", 2), 2), run_staged(config))


# ---- killed and resumed ----------------------------------------------------------------------------------------------

#: Flags of jobs that are killed after their second checkpoint.
RESUMED = {
    "momentum": "--optim.dense=sgd --optim.momentum=0.9 --optim.nesterov=true --optim.weight_decay=1e-4",
    "adamw, l2 decay of rows": (
        "--optim.dense=adamw --optim.beta2=0.9 --optim.weight_decay=0.1 --optim.rows=adam "
        "--optim.rows_weight_decay=0.5 --optim.rows_decay_kind=l2"
    ),
    "focal, norm": "--model.loss=focal --model.label_smoothing=0.1 --optim.clip_norm=0.05 --optim.clip_scope=all",
    "lamb, schedule": (
        "--optim.dense=lamb --optim.weight_decay=0.1 --optim.schedule=cosine --optim.schedule_length=20 "
        "--optim.warmup_steps=7"
    ),
    "momentum and decay of rows": (
        "--optim.rows=momentum --optim.rows_by_table=C1=adamw,C2=frozen --optim.rows_lr_by_table=C1=0.1 "
        "--optim.rows_weight_decay=0.5 --optim.schedule=cosine --optim.schedule_length=20 "
        "--data.eval_fraction=0.1"
    ),
}


@pytest.mark.redis
@pytest.mark.multiproc
@pytest.mark.parametrize("flags", some_of([flags.split() for flags in RESUMED.values()], {0, 3}), ids=[*RESUMED])
def test_a_killed_job_resumes(flags: Sequence[str], server: EmbeddedServer, tmp_path: Path) -> None:
    done = run_forked([*JOB, *flags, "--result", str(tmp_path / "uninterrupted.json")], tmp_path)
    assert (done.code, done.err) == (0, "")
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, *flags])
    assert job.run(dies_at="after-commit:2").code == -signal.SIGKILL
    done = job.run()
    assert (done.code, done.err) == (0, "")
    assert digests(job.result) == digests(tmp_path / "uninterrupted.json")
    assert job.resumed_from() == 10


@pytest.mark.redis
@pytest.mark.multiproc
def test_a_resume_changes_settings_by_name(server: EmbeddedServer, tmp_path: Path) -> None:
    """The same as a schedule that drops both rates at that step, also when the changed job is killed."""
    drop = ["--optim.schedule=step", "--optim.schedule_milestones=10", "--optim.schedule_factor=0.5"]
    done = run_forked([*JOB, *drop, "--result", str(tmp_path / "scheduled.json")], tmp_path)
    assert (done.code, done.err) == (0, "")
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url])
    assert job.run("--run.steps=10").code == 0
    changed = ["--optim.rows_lr=0.01", "--optim.dense_lr=0.01"]
    refused = job.run(*changed, "--checkpoint.change=optim.rows_lr")
    assert (refused.code, "made with optim.dense_lr 0.02, this job has 0.01" in refused.error_line) == (2, True)
    changed += ["--checkpoint.change=optim.rows_lr,optim.dense_lr,optim.eps"]
    died = job.run(*changed, dies_at="after-commit:1")
    assert died.code == -signal.SIGKILL
    assert "note: optim.dense_lr changes from 0.02 to 0.01 at step 10" in died.err.splitlines()
    done = job.run(*changed)
    assert (done.code, done.err) == (0, "")
    assert digests(job.result) == digests(tmp_path / "scheduled.json")
    newest = max(job.checkpoints.glob("*/*/manifest.json"), key=lambda path: path.parent.name)
    manifest = json.loads(newest.read_text())
    assert manifest["settings"]["optim.dense_lr"] == 0.01
    assert manifest["changes"] == [
        {"key": "optim.dense_lr", "step": 10, "before": 0.02, "after": 0.01},
        {"key": "optim.rows_lr", "step": 10, "before": 0.02, "after": 0.01},
    ]
