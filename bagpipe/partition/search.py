"""`find`: the best partition for one set of choices, by the search that suits the graph.

    few closed sets   CutSearch: the optimum of all partitions, series-parallel or not
    many              the better of TreeSearch (shallow: branch beside branch) and ChainSearch with relay=False
                      (runs of one order as stages of the graph: the stages may mix branches, the pipeline is deeper)

The result is never worse than the best chain partition of the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

from bagpipe.partition.bisect import probes
from bagpipe.partition.chain import ChainSearch
from bagpipe.partition.cost import CostModel
from bagpipe.partition.cuts import MOST_SETS, CutSearch, closed_sets
from bagpipe.partition.decompose import decompose
from bagpipe.partition.planner import Found, Problem, found
from bagpipe.partition.series_parallel import TreeSearch

__all__ = ["find", "graphpipe"]


def graphpipe(problem: Problem) -> Found | None:
    """The best stages of a graph: `find` for each number of micro-batches, and for all of them together."""
    return find(problem.model, problem.replicas, problem.microbatches)


def find(
    model: CostModel, replicas: Sequence[int], microbatches: Sequence[int], *, exact_limit: int = MOST_SETS
) -> Found | None:
    """Search the partitions of `model`'s graph over its devices.

    Args:
        model: the cost model.
        replicas: allowed replica counts of a stage.
        microbatches: allowed micro-batch counts of a stage. Only the exact search mixes counts in a partition.
        exact_limit: most closed sets for the exact search.

    Returns:
        None if no partition fits the memory.
    """
    allowed = sorted(r for r in set(replicas) if r <= model.cluster.devices)
    if not allowed:
        return None
    sets = closed_sets(model.graph, exact_limit)
    if sets is not None:
        layouts = list(probes(model.bottleneck, CutSearch(model, allowed, microbatches, sets).solve))
        return found(model, layouts, exact=True)
    layouts = []
    tree = decompose(model.graph)
    for count in microbatches:
        layouts += probes(model.bottleneck, TreeSearch(model, allowed, count, tree).solve, exact=False)
        layouts += probes(model.bottleneck, ChainSearch(model, allowed, count, relay=False).solve)
    return found(model, layouts, exact=False)
