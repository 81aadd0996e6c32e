"""`select_planner`: the planner of a job, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import InputError
from bagpipe.lookahead.inline import InlinePlanner
from bagpipe.lookahead.interface import BatchPlanner, WindowPlanner
from bagpipe.lookahead.planner_process import PlannerProcess
from bagpipe.lookahead.ranked import RankedPlanner, Uneven
from bagpipe.oracle.plan import OracleSpec

__all__ = ["PLANNERS", "PlannerName", "select_planner"]

#: Where batches are planned.
PlannerName = Literal["process", "inline"]

PLANNERS: Mapping[str, type[WindowPlanner]] = {"process": PlannerProcess, "inline": InlinePlanner}


def select_planner(
    spec: OracleSpec, *, planner: PlannerName = "process", group: RankGroup | None = None, uneven: Uneven = "stop"
) -> BatchPlanner:
    """The planner for one rank, not entered.

    Args:
        spec: what to plan for, for all ranks.
        planner: where: in a process of its own, or in the calling thread (with several ranks: that of rank 0).
        group: all ranks, on the host, such as `TorchPeers.plans`; None: there is one rank.
        uneven: see `RankedPlanner`.

    Raises:
        InputError: an unknown name, or a spec that cannot be planned for.
        ValueError: the spec is not for this number of ranks.
    """
    if planner not in PLANNERS:
        raise InputError(f"planner must be one of {', '.join(PLANNERS)}, got {planner!r}")
    if group is not None:
        return RankedPlanner(spec, group, planner=PLANNERS[planner], uneven=uneven)
    if spec.world_size != 1:
        raise ValueError(f"expected a spec for 1 rank, got {spec.world_size}")
    return PLANNERS[planner](spec)
