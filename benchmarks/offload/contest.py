"""One model per budget, trained on the same batches in turns."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bagpipe.dense.chunks.budget import Budget
from bagpipe.dense.chunks.chunked_model import ChunkedModel
from bagpipe.dense.chunks.layout import aligned
from bagpipe.dense.chunks.moments import Moment
from bagpipe.dense.chunks.simulate import simulate_moves
from bagpipe.dense.chunks.walker import Walker
from bagpipe.pipeline.stream import NullStreams
from benchmarks.harness.rounds import time_rounds, timed

__all__ = ["Found", "Sizes", "contest"]

#: Without chunks; the others are compared with it.
PLAIN = "no chunks"
#: Adam's moments.
_KINDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The model and the measurement.

    Attributes:
        layers, width: of a chain of square layers with biases.
        examples: of a batch.
        shares: budgets as shares of all chunks; `state_on_host` is one more contestant.
        rounds: batches that count, after `warmups`.
    """

    layers: int
    width: int
    examples: int
    shares: Sequence[float]
    rounds: int
    warmups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of one contestant.

    Attributes:
        name: the budget.
        budget_bytes, state_bytes, peak_bytes: of chunks on the device at most; of parameters, gradients and state; most
            that were there.
        seconds: of each batch.
        processor_s: processor time of each batch, of all threads.
        copies: chunks copied a batch, both ways.
        simulated: ratio of the times of a batch with and without moves; None: no chunks.
        digest: of the parameters at the end.
    """

    name: str
    budget_bytes: int
    state_bytes: int
    peak_bytes: int
    seconds: Sequence[float]
    processor_s: Sequence[float]
    copies: float
    simulated: float | None
    digest: str


class _Contestant:
    def __init__(self, sizes: Sizes, budget: Budget | None) -> None:
        torch.manual_seed(7)
        layers = [nn.Sequential(nn.Linear(sizes.width, sizes.width), nn.ReLU()) for _ in range(sizes.layers)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.values = torch.randn(sizes.examples, sizes.width)
        self.processor_s: list[float] = []
        self.chunked: ChunkedModel | None = None
        if budget is not None:
            self.chunked = ChunkedModel.of(self.model, self.optimizer, budget, NullStreams())
            self.chunked.start()

    def timed_batch(self) -> None:
        """A batch, its processor time kept."""
        start_s = time.process_time()
        self.batch()
        self.processor_s.append(time.process_time() - start_s)

    def batch(self) -> None:
        chunked = self.chunked
        if chunked is None:
            self._loss().backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            return
        chunked.begin()
        with chunked.computing():
            loss = self._loss()
        loss.backward()  # type: ignore[no-untyped-call]
        chunked.step(lambda parameters: self.optimizer.step())
        chunked.finish()

    def _loss(self) -> Tensor:
        found: Tensor = self.model(self.values).square().mean()
        return found

    def digest(self) -> str:
        if self.chunked is not None:
            self.chunked.end()
            self.chunked.close()
        sha = hashlib.sha256()
        for parameter in self.model.parameters():
            sha.update(parameter.detach().numpy().tobytes())
        return sha.hexdigest()


def contest(sizes: Sizes, say: Callable[[str], None]) -> list[Found]:
    """Train all contestants. The first one has no chunks."""
    chunk_bytes = aligned(4 * sizes.width**2) + aligned(4 * sizes.width)  # a layer
    total = _KINDS * sizes.layers * chunk_bytes
    budgets: dict[str, Budget | None] = {PLAIN: None}
    for share in sizes.shares:
        budgets[f"{share:.2f}"] = Budget(num_bytes=int(share * total), chunk_bytes=chunk_bytes)
    budgets["state on the host"] = Budget(chunk_bytes=chunk_bytes, state_on_host=True)
    contestants = {name: _Contestant(sizes, budget) for name, budget in budgets.items()}
    for name, each in contestants.items():
        each.batch()
        say(f"{name}: ready")
    before = {name: _copies(each) for name, each in contestants.items()}
    seconds = time_rounds(
        {name: each.timed_batch for name, each in contestants.items()},
        sizes.rounds,
        warmups=sizes.warmups,
        shuffle_seed=1,
    )
    counted = sizes.rounds + sizes.warmups
    copies = {name: (_copies(each) - before[name]) / counted for name, each in contestants.items()}
    digests = {name: each.digest() for name, each in contestants.items()}
    compute, copy_s = _costs(contestants["1.00"], chunk_bytes)
    found = []
    for name, each in contestants.items():
        chunked, simulated, peak = each.chunked, None, total
        if chunked is not None and chunked.walker.plan is not None:
            peak = chunked.arena.peak_bytes
            plan = chunked.walker.plan
            simulated = simulate_moves(plan, [compute[moment] for moment in plan.trace], copy_s).ratio
        budget = total if chunked is None else chunked.arena.num_slots * chunk_bytes
        found.append(
            Found(
                name=name,
                budget_bytes=budget,
                state_bytes=total,
                peak_bytes=peak,
                seconds=seconds[name],
                processor_s=each.processor_s[-sizes.rounds :],
                copies=copies[name],
                simulated=simulated,
                digest=digests[name],
            )
        )
    return found


def _copies(contestant: _Contestant) -> int:
    return 0 if contestant.chunked is None else sum(contestant.chunked.arena.lane.num_copies.values())


def _costs(resident: _Contestant, chunk_bytes: int) -> tuple[Mapping[Moment, float], float]:
    """Seconds of each moment of a batch whose chunks are all on the device, the least of some, and of a copy."""
    chunked = resident.chunked
    assert chunked is not None, "it has chunks"
    source, target = torch.empty(chunk_bytes, dtype=torch.uint8), torch.empty(chunk_bytes, dtype=torch.uint8)
    copy_s, _ = timed(lambda: target.copy_(source), 20)
    seconds: dict[Moment, float] = {}
    walker: Walker = chunked.walker
    enter = walker.enter
    for _ in range(5):
        entered: list[tuple[Moment, float]] = []

        def timing(moment: Moment, entered: list[tuple[Moment, float]] = entered) -> None:
            entered.append((moment, time.perf_counter()))
            enter(moment)

        walker.enter = timing  # type: ignore[method-assign]
        resident.batch()
        end_s = time.perf_counter()
        ends = [*(at for _, at in entered[1:]), end_s]
        for (moment, start_s), stop_s in zip(entered, ends, strict=True):
            seconds[moment] = min(seconds.get(moment, stop_s - start_s), stop_s - start_s)
    del walker.enter
    return seconds, copy_s
