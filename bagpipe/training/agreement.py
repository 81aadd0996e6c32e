"""`Agreement`: what all stages of all ranks know of a batch before the first of them makes its optimizer step.

    process: is its batch bad?   stages: norms of gradients   ──all-gather──> is it bad anywhere, norms of all gradients

A norm comes from one rank, the first that holds the stage, so it has the same bits for any placement. Where the holders
of a stage have shares of its gradients, each gives the squares of its own, which are added in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from bagpipe.dense.clip import Clip
from bagpipe.dense.parallel.buckets import add_up
from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import JobError
from bagpipe.pipeline.stage.dense_pipeline import DensePipeline

__all__ = ["Agreement", "agreement_of", "needs_agreement"]


class Agreement:
    """One rank's part. One thread of every rank calls `reach`, once per batch.

    Args:
        parameters: by stage, the names of its trainable parameters; empty: no norms are asked for.
        order: all these names in the order in which norms are listed.
        gives: the stages whose norms this rank gives.
        divided: the stages whose holders give the squares of their shares.
        device: of the exchange.
        group: all ranks; None: there is one.
    """

    def __init__(
        self,
        parameters: Mapping[int, Sequence[str]],
        order: Sequence[str],
        *,
        gives: Collection[int],
        divided: Collection[int],
        device: torch.device,
        group: RankGroup | None = None,
    ) -> None:
        self._group = group
        self._device = device
        self._gives = frozenset(gives) | frozenset(divided)
        columns: dict[str, int] = {}
        self._spans: dict[int, slice] = {}
        for stage, names in sorted(parameters.items()):
            first = 1 + len(columns)
            columns |= {name: first + position for position, name in enumerate(names)}
            self._spans[stage] = slice(first, first + len(names))
        self._num_columns = 1 + len(columns)
        places = [columns[name] for name in order if name in columns]
        self._order = torch.tensor(places, dtype=torch.int64, device=device)
        squares = [False] * self._num_columns
        for stage in divided:
            if stage in self._spans:
                squares[self._spans[stage]] = [True] * len(parameters[stage])
        self._are_squares = torch.tensor(squares, device=device)

    def reach(self, *, is_bad: bool, norms: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
        """Tell all ranks, and hear from them.

        Args:
            is_bad: of this process.
            norms: by local stage, float64 ``[parameters]``: norms of the gradients, or squares if it is divided.

        Returns:
            Float64 scalar, in how many processes the batch is bad; float64 ``[parameters]``, the norms of all
            gradients, 0 of a parameter without one.

        Raises:
            PeerError: a rank is gone or silent.
        """
        told = torch.zeros(self._num_columns, dtype=torch.float64, device=self._device)
        told[0] = is_bad
        for stage, span in self._spans.items():
            if stage in self._gives and stage in norms:
                told[span] = norms[stage]
        if self._group is not None:
            told = add_up(self._group, told)
        known = torch.where(self._are_squares, told.sqrt(), told)
        return known[0], known[self._order]


def needs_agreement(clip: Clip, *, skips: bool) -> bool:
    """Whether the step of a stage depends on the gradients of all stages of all ranks.

    Args:
        clip: limits of gradients.
        skips: batches that are not finite are left out.
    """
    return skips or clip.limits_dense


def agreement_of(
    pipeline: DensePipeline, clip: Clip, parameters: Mapping[str, nn.Parameter], ranks: RankGroup | None
) -> Agreement:
    """The agreement of the stages of a pipeline.

    Args:
        pipeline: of this rank.
        clip: limits of gradients.
        parameters: that are trained, on whatever rank, by name.
        ranks: group of all ranks; None: there is one.

    Raises:
        JobError: there are several ranks, but no group leads to them.
    """
    staged, mesh, rank = pipeline.staged, pipeline.mesh, 0 if ranks is None else ranks.rank
    if ranks is None and mesh.world_size > 1:
        raise JobError(f"{mesh.world_size} ranks agree on a batch, but no group leads to them")
    stages = range(len(staged.stages))
    measured = {} if not clip.limits_dense else {n: [name for name, _ in staged.parameters_of(n)] for n in stages}
    return Agreement(
        measured,
        [name for name, _ in staged.model.named_parameters() if name in parameters],
        gives=[stage for stage in pipeline.stages if mesh.holders(stage)[0] == rank],
        divided=[stage for stage in stages if pipeline.is_divided and len(mesh.holders(stage)) > 1],
        device=pipeline.device,
        group=ranks,
    )
