"""K-FAC of a job: which layers, owned by whom, and what is refused."""

from __future__ import annotations

import dataclasses

from bagpipe.config.optim_section import OptimConfig
from bagpipe.config.sections import Config
from bagpipe.schedule.ir.actions import Action
from bagpipe.testing.local_peers import local_peers
from tests.trainer.test_stages import staged
from trainer.precondition import (
    kfac_settings,
    layered_ranks,
    layers_of_stages,
    preconditioning_of,
    stage_costs,
    stage_kfacs,
)

CONFIG = Config(optim=OptimConfig(precondition="kfac", kfac_damping=0.5, kfac_lag=1, kfac_factors="local"))
PIPELINE = {"schedule": "1f1b", "stages": 3, "microbatches": 2}


def test_the_numbers_are_those_of_the_keys() -> None:
    settings = kfac_settings(CONFIG.optim)
    assert (settings.damping, settings.lag, settings.factors) == (0.5, 1, "local")
    assert dataclasses.asdict(kfac_settings(OptimConfig())) == {
        "decay": 0.95,
        "damping": 0.003,
        "kappa": 0.001,
        "factor_every": 1,
        "inverse_every": 10,
        "lag": 0,
        "factors": "summed",
    }


def test_stages_own_their_layers() -> None:
    job = staged(**PIPELINE)
    layers = layers_of_stages(job.staged)
    found = stage_kfacs(job.staged, job.mesh, CONFIG, rank=0)
    assert {stage: len(kfac.layers) for stage, kfac in found.kfacs.items()} == {n: len(x) for n, x in layers.items()}
    assert all(kfac.owned == tuple(range(len(kfac.layers))) for kfac in found.kfacs.values())
    assert not any(kfac.is_shared for kfac in found.kfacs.values())
    names = {layer.name for own in layers.values() for layer in own}
    assert names <= {name.removesuffix(".weight") for name, _ in job.staged.model.named_parameters()}


def test_holders_of_a_stage_deal_its_layers() -> None:
    job = staged(2, microbatches=2)
    owned = []
    for peer in local_peers(2):
        groups = peer.open_stage_groups([range(2)])
        found = stage_kfacs(job.staged, job.mesh, CONFIG, rank=peer.rank, groups=groups, layered=groups[0, 1])
        owned.append(found.kfacs[0].owned)
    assert sorted(number for numbers in owned for number in numbers) == list(
        range(len(layers_of_stages(job.staged)[0]))
    )
    assert owned[0][0] == 0
    assert owned[1][0] == 1


def test_work_costs_its_operations() -> None:
    job = staged(**PIPELINE)
    work = preconditioning_of(job.staged, dataclasses.replace(CONFIG.optim, kfac_kappa=0.0))
    assert (work.lag, work.limits, work.summed) == (1, False, False)
    (stage, *_), cost = work.layers, stage_costs(job.staged, 10)
    layers = layers_of_stages(job.staged)[stage]
    assert cost(Action(stage, "F", 0)) == sum(20 * each.num_inputs * each.num_outputs for each in layers)
    assert cost(Action(stage, "I", 0)) * 2 == cost(Action(stage, "B", 0)) == 2 * cost(Action(stage, "REC", 0))
    assert cost(Action(stage, "X_INV", work.layers[stage])) == layers[0].num_inputs ** 3 + layers[0].num_outputs ** 3
    assert cost(Action(stage, "OPT", 0)) == 0


def test_ranks_with_layers() -> None:
    """The stage of the interaction has none."""
    job = staged(3, **PIPELINE)
    layered = layered_ranks(job.staged, job.mesh)
    assert layered == tuple(sorted(layers_of_stages(job.staged)))
