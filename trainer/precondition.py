"""K-FAC of a job's dense part, from its configuration.

optim.{precondition,kfac_*} ──kfac_settings──> KfacSettings
stages, ranks ──stage_kfacs──> Kfac of each local stage    (of a whole model: `bagpipe.training.whole_kfac`)
stages ──preconditioning_of, stage_costs──> what their program does, and costs by which it is placed
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from bagpipe.config.sections import Config, OptimConfig
from bagpipe.dense.precondition.costs import LayerShape, flops
from bagpipe.dense.precondition.kfac import Kfac, KfacSettings
from bagpipe.dense.precondition.layers import LinearLayer, linear_layers
from bagpipe.dense.precondition.step_sizes import StepSizes
from bagpipe.distributed.interface import RankGroup
from bagpipe.pipeline.stage.mesh import Mesh
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.lowering.precondition import Preconditioning
from bagpipe.split.staged_model import StagedModel
from bagpipe.training.whole_kfac import check_any_layers, check_factor_memory

__all__ = [
    "StageKfacs",
    "kfac_settings",
    "layered_ranks",
    "layers_of_stages",
    "preconditioning_of",
    "stage_costs",
    "stage_kfacs",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKfacs:
    """K-FAC of the stages of one rank.

    Attributes:
        kfacs: by local stage with linear layers.
        sizes: of the steps of all stages.
    """

    kfacs: Mapping[int, Kfac]
    sizes: StepSizes


def kfac_settings(optim: OptimConfig) -> KfacSettings:
    """The numbers of K-FAC."""
    return KfacSettings(
        decay=optim.kfac_decay,
        damping=optim.kfac_damping,
        kappa=optim.kfac_kappa,
        factor_every=optim.kfac_factor_every,
        inverse_every=optim.kfac_inverse_every,
        lag=optim.kfac_lag,
        factors=optim.kfac_factors,
    )


def layers_of_stages(staged: StagedModel) -> Mapping[int, tuple[LinearLayer, ...]]:
    """The linear layers of every stage that has some.

    Raises:
        InputError: there are none, or others that are not supported.
    """
    names = {id(parameter): name for name, parameter in staged.model.named_parameters()}
    found = {number: linear_layers(stage.module, names) for number, stage in enumerate(staged.stages)}
    check_any_layers([layer for layers in found.values() for layer in layers])
    return {number: layers for number, layers in found.items() if layers}


def layered_ranks(staged: StagedModel, mesh: Mesh) -> tuple[int, ...]:
    """The ranks that hold a stage with linear layers, ascending.

    Raises:
        InputError: as `layers_of_stages`.
    """
    return tuple(sorted({rank for stage in layers_of_stages(staged) for rank in mesh.holders(stage)}))


def preconditioning_of(staged: StagedModel, optim: OptimConfig) -> Preconditioning:
    """The second-order work of the stages, for their program.

    Raises:
        InputError: as `layers_of_stages`.
    """
    return Preconditioning(
        layers={stage: len(layers) for stage, layers in layers_of_stages(staged).items()},
        lag=optim.kfac_lag,
        limits=optim.kfac_kappa > 0,
        summed=optim.kfac_factors == "summed",
    )


def stage_costs(staged: StagedModel, num_examples: int, *, fits: bool = True) -> Callable[[Action], float]:
    """Costs by which the work is placed: floating-point operations of linear layers, other operators for free.

    Args:
        staged: the model.
        num_examples: of a micro-batch.
        fits: False: covariances and inversions fit into no gap.
    """
    shapes = {
        stage: [LayerShape(num_inputs=each.num_inputs, num_outputs=each.num_outputs) for each in layers]
        for stage, layers in layers_of_stages(staged).items()
    }
    work = {stage: [flops(shape, num_examples) for shape in own] for stage, own in shapes.items()}

    def cost(action: Action) -> float:
        own = work.get(action.stage % len(staged.stages), [])
        if action.op in ("COV_A", "COV_G", "X_INV") and not fits:
            return math.inf
        if action.op == "X_INV" and own:
            return own[(action.index or 0) % len(own)]["X_INV"]
        op, share = ("B", 0.5) if action.op in ("I", "W") else ("F" if action.op == "REC" else action.op, 1.0)
        return sum(each.get(op, 0.0) * share for each in own)

    return cost


def stage_kfacs(
    staged: StagedModel,
    mesh: Mesh,
    config: Config,
    *,
    rank: int,
    groups: Mapping[tuple[int, ...], RankGroup] | None = None,
    layered: RankGroup | None = None,
) -> StageKfacs:
    """K-FAC of the stages that a rank holds. A layer is owned by one of the ranks that hold its stage.

    Args:
        staged: the model.
        mesh: the ranks.
        config: the job.
        rank: this rank.
        groups: by ascending ranks, those that hold a stage; None: this rank alone holds each.
        layered: the ranks that hold layers (`layered_ranks`); None: this rank alone does.

    Raises:
        InputError: as `layers_of_stages`, or the factors do not fit.
    """
    layers, settings = layers_of_stages(staged), kfac_settings(config.optim)
    kfacs: dict[int, Kfac] = {}
    for stage in (stage for stage in mesh.stages_of(rank) if stage in layers):
        holders = mesh.holders(stage)
        group: RankGroup | None = None
        if len(holders) > 1:
            assert groups is not None, "several ranks hold the stage"
            group = groups[tuple(sorted(holders))]
        order = [sorted(holders).index(holder) for holder in holders]
        kfacs[stage] = Kfac.of_group(layers[stage], settings, group, order)
        kfacs[stage].can_leave_out = config.run.nonfinite == "skip"
    check_factor_memory([*kfacs.values()], torch.device(config.run.device))
    gives = frozenset(stage for stage in kfacs if mesh.holders(stage)[0] == rank)
    counts = {stage: len(own) for stage, own in layers.items()}
    return StageKfacs(kfacs=kfacs, sizes=StepSizes(counts, gives=gives, group=layered))
