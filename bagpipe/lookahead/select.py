"""`select_planner`: the planner of a job, by name or by the address of a cacher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from bagpipe.client.access import Cacher
from bagpipe.client.address import parse_address
from bagpipe.distributed.interface import RankGroup
from bagpipe.lookahead.inline import InlinePlanner
from bagpipe.lookahead.interface import BatchPlanner, WindowPlanner
from bagpipe.lookahead.planner_process import PlannerProcess
from bagpipe.lookahead.ranked import RankedPlanner, Uneven
from bagpipe.oracle.plan import OracleSpec
from bagpipe.util.environment import check_import

__all__ = ["PLANNERS", "PlannerChoice", "PlannerName", "check_planner", "select_planner"]

#: Planners in this program.
PlannerName = Literal["process", "inline"]

#: Where batches are planned: one of these, or the address of a cacher.
PlannerChoice = PlannerName | str | Cacher

PLANNERS: Mapping[str, type[WindowPlanner]] = {"process": PlannerProcess, "inline": InlinePlanner}


def check_planner(planner: PlannerChoice) -> None:
    """Check a choice. Opens nothing.

    Raises:
        InputError: neither a name nor an address.
    """
    if not isinstance(planner, Cacher) and planner not in PLANNERS:
        others = "".join(f"{name}, " for name in PLANNERS)
        parse_address(str(planner), subject="planner", others=others)


def select_planner(
    spec: OracleSpec, *, planner: PlannerChoice = "process", group: RankGroup | None = None, uneven: Uneven = "stop"
) -> BatchPlanner:
    """The planner for one rank, not entered.

    Args:
        spec: what to plan for, for all ranks.
        planner: where: in a process of its own, in the calling thread, or in a cacher. With several ranks: that of rank
            0, which alone reaches the cacher.
        group: all ranks, on the host, such as `TorchPeers.plans`; None: there is one rank.
        uneven: see `RankedPlanner`.

    Raises:
        InputError: an unknown name, or a spec that cannot be planned for.
        ValueError: the spec is not for this number of ranks.
    """
    check_planner(planner)
    make = _maker(planner)
    if group is not None:
        return RankedPlanner(spec, group, planner=make, uneven=uneven)
    if spec.world_size != 1:
        raise ValueError(f"expected a spec for 1 rank, got {spec.world_size}")
    return make(spec)


def _maker(planner: PlannerChoice) -> Callable[[OracleSpec], WindowPlanner]:
    if isinstance(planner, str) and planner in PLANNERS:
        return PLANNERS[planner]
    try:
        from bagpipe.lookahead.remote import RemotePlanner  # the only planner that needs gRPC
    except ImportError as error:
        check_import(error)
        raise
    return partial(RemotePlanner, cacher=planner if isinstance(planner, Cacher) else Cacher(planner))
