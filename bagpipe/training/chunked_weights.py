"""`ChunkedWeights`: weights in chunks under a byte budget of the device, with their gradients and optimizer state.

    F  forward, units come one after another    B  gradients go to their chunks    OPT  chunk by chunk

Of a model that is divided among ranks (`ShardedModel`) chunks hold what the forward needs and what this rank steps:

    dense.shard            chunks of parameters   of segments, their gradients and state   beside the budget
    optimizer, gradients   all                    this rank's                              what is sent
    parameters             none                   this rank's                              … and gathered units

The same operators in the same order as without chunks, on the same values: the same bits. Only where gradients are
looked at or limited differs: each while it is on the device. A norm is that of the norms of gradients, one by one, in
the order of the parameters.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from bagpipe.checkpoint.dense_state import DenseCopy, DenseState
from bagpipe.dense.chunks.budget import Budget, Piece
from bagpipe.dense.chunks.chunked_model import ChunkedModel
from bagpipe.dense.clip import Clip, Limited, Prepare, listed
from bagpipe.dense.parallel.sharded import ShardedModel
from bagpipe.errors import InputError
from bagpipe.pipeline.report import LaneReport
from bagpipe.pipeline.stream import Streams
from bagpipe.pipeline.trace import Trace
from bagpipe.training.weights import Weights

__all__ = ["ChunkedWeights"]


class ChunkedWeights(Weights):
    """See above.

    Args:
        whole: the weights. The executor of their model keeps no address of a parameter.
        budget: of the device.
        streams: of the model's device.
        module: that the executor calls with the parameters; None: the model.

    Attributes:
        chunked: the model in chunks.

    Raises:
        InputError: several ranks have devices, or see `ChunkedModel.of`.
    """

    def __init__(self, whole: Weights, *, budget: Budget, streams: Streams, module: nn.Module | None = None) -> None:
        self.model, self.optimizer, self.device = whole.model, whole.optimizer, whole.device
        self.shares, self.sharded, self.replicas = whole.shares, whole.sharded, whole.replicas
        self._whole = whole
        if (self.replicas is not None or self.sharded is not None) and streams.is_async:
            raise InputError(
                "chunks of the dense part are not possible on several ranks with CUDA devices: use run.device cpu"
            )
        pieces = _pieces(self.model, self.optimizer, self.sharded, self.model if module is None else module)
        self._stepped = len(pieces) - 1
        self._are_divided = self.sharded is not None and not self._stepped
        self._prepare: Prepare | None = None  # of gradients that are prepared in the step
        self.chunked = ChunkedModel.of_pieces(pieces, budget, streams, whole=self.model)
        if self.sharded is not None:
            self.sharded.live_apart()

    # ---- a batch -------------------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        self.chunked.begin()
        if self._are_divided:
            self.chunked.settle()  # nothing moves before the step, while units are gathered from this rank's share

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self._whole.forward():
            if self._are_divided:
                yield
            else:
                with self.chunked.computing():
                    yield

    def backward(self) -> AbstractContextManager[object]:
        return self._whole.backward()

    def reduce(self, *, is_bad: bool | None) -> bool:
        if self.replicas is not None:
            self.chunked.gradients.show()
        return self._whole.reduce(is_bad=is_bad)

    def show(self, wanted: Container[str], prepare: Prepare) -> None:
        if self.replicas is not None or self.sharded is not None:
            self._whole.show(wanted, prepare)
            return
        self.chunked.show({own for name, own in self.named() if name in wanted}, prepare, piece=self._stepped)

    def take_shown(self, wanted: Container[str]) -> None:
        if self.replicas is not None or self.sharded is not None:
            self._whole.take_shown(wanted)
            return
        self.chunked.take_shown([own for name, own in self.named() if name in wanted])

    def measure(self, prepare: Prepare, clip: Clip) -> Sequence[Tensor]:
        if self.replicas is not None:
            self.chunked.gradients.take_shown()
        if self.sharded is not None:
            self.chunked.take_back(self._stepped)
        if not clip.limits_dense:
            self._prepare = prepare
            return ()
        # It needs all gradients before the first step: one more pass through them.
        found: dict[nn.Parameter, Tensor] = {}
        norms = list[Tensor]()

        def look(parameters: Sequence[nn.Parameter]) -> None:
            prepare(parameters)
            if self.sharded is None:
                norms.extend(clip.measure(parameters))
            else:
                found.update(zip(parameters, clip.norms(parameters, squares=True), strict=True))

        self.chunked.measure(look, piece=self._stepped)
        if self.sharded is not None:
            return self.sharded.whole_norms(listed(found, self.sharded.segments.values()))
        return norms

    def step(self, clip: Clip, limited: Limited | None) -> None:
        prepare, self._prepare = self._prepare, None
        self.chunked.step_limited(self.optimizer.step, clip, limited, prepare=prepare, piece=self._stepped)
        if self.sharded is not None:
            self.chunked.open()
            self._whole.spread()

    def clear(self) -> None:
        self._whole.clear()
        self.chunked.finish()

    # ---- what others see -----------------------------------------------------------------------------------------

    @property
    def stepped(self) -> Iterable[nn.Parameter]:
        return self._whole.stepped

    def named(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self._whole.named()

    def gradients(self) -> Iterable[tuple[str, Tensor]]:
        return self.chunked.marks.items() if self.sharded is None else self._whole.gradients()

    # ---- between batches -----------------------------------------------------------------------------------------

    def begin(self, trace: Trace | None = None) -> None:
        self.rest()  # an earlier run can have been given up
        self._whole.begin(trace)
        self.chunked.start(trace)

    def end(self) -> None:
        self.chunked.end()
        self._whole.end()

    def close(self) -> None:
        self.chunked.close()
        self._whole.close()

    def rest(self) -> None:
        self.chunked.rest()

    def whole(self) -> AbstractContextManager[object]:
        self.rest()  # what ranks share is home
        return self._whole.whole()

    def keep_averages(self, averages: Mapping[str, Tensor], decay: float) -> bool:
        self.chunked.keep_averages(averages, decay)
        return True

    def lane_reports(self) -> Mapping[str, LaneReport]:
        return self.chunked.arena.lane.reports("compute")

    def capture(self, streams: Streams, *, rng: Mapping[str, Tensor] | None, parts: Mapping[str, Tensor]) -> DenseCopy:
        self.chunked.settle()
        return self._whole.capture(streams, rng=rng, parts=parts)

    def restore(self, state: DenseState) -> None:
        self._whole.restore(state)

    def digest(self) -> str:
        return self._whole.digest()


def _pieces(model: nn.Module, optimizer: Optimizer, shards: ShardedModel | None, module: nn.Module) -> list[Piece]:
    """What is in chunks: the parameters unless they are divided, and at the end what the optimizer steps."""
    parameters = dict(model.named_parameters())
    if shards is None:
        return [Piece(module=module, parameters=parameters, optimizer=optimizer)]
    whole = Piece(module=module, parameters=parameters, optimizer=None, collects=False)
    own = Piece(module=model, parameters=shards.segments, optimizer=optimizer)
    return [own] if shards.level == "parameters" else [whole, own]
