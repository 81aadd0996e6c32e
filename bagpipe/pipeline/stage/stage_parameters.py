"""`StageParameters`: which parameters of a model in stages a rank has, if those of its stages are divided.

before a run, in evaluations, after it   the whole model
in a run                                 shares of its stages, and what UNSHARD has gathered of them until RESHARD;
                                         a stage of its own that no other rank holds; nothing of other stages
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch

from bagpipe.dense.parallel.closed_parameter import absent, close, open_again
from bagpipe.dense.parallel.saved_places import SavedPlaces
from bagpipe.dense.parallel.stage_shards import StageShare
from bagpipe.pipeline.stage.runtime import StageRuntime
from bagpipe.split.staged_model import StagedModel

__all__ = ["StageParameters"]


class StageParameters:
    """The parameters on one rank. All ranks make the same calls, between batches.

    Args:
        staged: the model.
        stages: the stages of this rank.
        shares: of the stages that are divided.
        are_divided: parameters are, of some stages; otherwise they stay where they are.

    Attributes:
        are_whole: the whole model is here.
    """

    def __init__(
        self,
        staged: StagedModel,
        stages: Collection[int],
        shares: Mapping[int, StageShare],
        *,
        are_divided: bool,
    ) -> None:
        self.are_whole = True
        self._shares = shares
        self._are_divided = are_divided
        own = {id(parameter) for stage in stages for _, parameter in staged.parameters_of(stage)}
        named = (p for stage in range(len(staged.stages)) for _, p in staged.parameters_of(stage))
        self._of_others = [parameter for parameter in named if id(parameter) not in own]

    @property
    def places(self) -> Mapping[int, SavedPlaces]:
        """Of the stages whose graphs outlive the memory of their parameters."""
        return {stage: share.places for stage, share in self._shares.items() if share.level == "parameters"}

    def begin(self, runtime: StageRuntime) -> None:
        """A run begins with the whole model, and with the copies that the runtime has of parameters.

        Raises:
            InputError: something keeps a view of a parameter.
        """
        if self._are_divided:
            for stage, share in self._shares.items():
                share.begin(runtime.parameters(stage))
            self._release()

    def join(self) -> None:
        """The stages of this rank get their whole parameters, others room for theirs: NaN until somebody sends them.

        Raises:
            PeerError: a peer is gone or silent.
        """
        if self.are_whole:
            return
        for share in self._shares.values():
            share.gather()
        for parameter in self._of_others:
            open_again(parameter)
            parameter.data = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype, device=parameter.device)
        self.are_whole = True

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the model is as `join` makes it."""
        were_whole = self.are_whole
        self.join()
        try:
            yield
        finally:
            if not were_whole:
                self._release()

    def _release(self) -> None:
        for share in self._shares.values():
            share.release()
        for parameter in self._of_others:
            parameter.data = absent(parameter)
            close(parameter)
        self.are_whole = False
