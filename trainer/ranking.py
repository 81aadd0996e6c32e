"""Areas under ROC curves, of all examples or by group: exact counts of pairs, in integers. With weights, sums.

    (score, label, group) ──sort by group, score──> runs of equal scores ──> doubled rank sums of positives ──> Areas

The area is the share of pairs (positive, negative) whose positive has the higher score; a tie counts half (Mann and
Whitney 1947). The doubled rank sum of a group is an integer, below 2**63 for up to 2 * 10**9 examples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Areas", "areas_by_group"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Areas:
    """Areas of some groups, in ascending order of the groups' numbers.

    Attributes:
        groups: int64 ``[num_groups]``, numbers of the groups.
        examples, positives: int64 ``[num_groups]``, their examples, and those with label 1. Of weighted examples:
            float64, the sums of their weights.
        wins: int64 ``[num_groups]``, twice the pairs whose positive has the higher score, plus the pairs with a tie. Of
            weighted examples: float64, where a pair counts as the product of its weights.
    """

    groups: NDArray[np.int64]
    examples: NDArray[Any]
    positives: NDArray[Any]
    wins: NDArray[Any]

    @property
    def has_both(self) -> NDArray[np.bool_]:
        """bool ``[num_groups]``: the group has both classes, so its area is defined."""
        return (self.positives > 0) & (self.positives < self.examples)

    def areas(self) -> NDArray[np.float64]:
        """float64 ``[num_defined]``, the areas of the groups with both classes."""
        has_both = self.has_both
        pairs = self.positives[has_both] * (self.examples[has_both] - self.positives[has_both])
        areas: NDArray[np.float64] = self.wins[has_both] / 2 / pairs
        return areas


def areas_by_group(
    scores: NDArray[np.float64],
    positive: NDArray[np.bool_],
    groups: NDArray[np.int64] | None = None,
    weights: NDArray[np.float64] | None = None,
) -> Areas:
    """The areas of some examples.

    Args:
        scores: ``[n]``, n at least 1; finite.
        positive: ``[n]``, whether the label is 1.
        groups: ``[n]``, a number per example; None: all examples are one group, numbered 0.
        weights: ``[n]``, above 0; None: all weigh the same.
    """
    if groups is None:
        order = np.argsort(scores)
        groups = np.zeros(len(scores), np.int64)
    else:
        order = np.lexsort((scores, groups))
        groups = groups[order]
    scores, positive = scores[order], positive[order]
    new_group = np.concatenate([[True], groups[1:] != groups[:-1]])
    new_run = new_group.copy()
    new_run[1:] |= scores[1:] != scores[:-1]
    group_starts, run_starts = np.flatnonzero(new_group), np.flatnonzero(new_run)
    run_ends = np.append(run_starts[1:], len(scores))
    group_of_run = np.cumsum(new_group)[run_starts] - 1
    first_runs = np.searchsorted(group_of_run, np.arange(len(group_starts)))
    if weights is not None:
        ordered = weights[order]
        positives, examples, wins = _weighted(ordered, positive, run_starts, group_of_run, first_runs)
        return Areas(groups=groups[group_starts], examples=examples, positives=positives, wins=wins)
    run_positives = np.add.reduceat(positive, run_starts, dtype=np.int64)
    # Ranks of a run count from 1 in its group, and ties share the mean of theirs: its first plus its last rank, over 2.
    doubled_ranks = run_starts + run_ends + 1 - 2 * group_starts[group_of_run]
    positives = np.add.reduceat(run_positives, first_runs)
    rank_sums = np.add.reduceat(run_positives * doubled_ranks, first_runs)
    return Areas(
        groups=groups[group_starts],
        examples=np.diff(np.append(group_starts, len(scores))),
        positives=positives,
        wins=rank_sums - positives * (positives + 1),
    )


def _weighted(
    weights: NDArray[np.float64],
    positive: NDArray[np.bool_],
    run_starts: NDArray[np.int64],
    group_of_run: NDArray[np.int64],
    first_runs: NDArray[np.int64],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Sums of the weights of positives and of all examples, and wins, by group; of sorted examples."""
    run_positives = np.add.reduceat(np.where(positive, weights, 0.0), run_starts)
    run_negatives = np.add.reduceat(np.where(positive, 0.0, weights), run_starts)
    before = np.cumsum(run_negatives) - run_negatives  # negatives with a lower score, in the groups before too
    before -= before[first_runs][group_of_run]
    positives = np.add.reduceat(run_positives, first_runs)
    negatives = np.add.reduceat(run_negatives, first_runs)
    wins = np.add.reduceat(run_positives * (2 * before + run_negatives), first_runs)
    return positives, positives + negatives, wins
