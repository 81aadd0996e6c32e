"""`DenseParallel` in real processes: sums over ranks with equal bits on all ranks and for any bucket size."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bagpipe.dense.parallel.replicated import DenseParallel
from bagpipe.distributed.process_groups import TorchPeers
from bagpipe.errors import JobError, PeerError
from tests.distributed.processes import run_peers
from tests.distributed.threads import run_threads

pytestmark = pytest.mark.multiproc

NUM_EXAMPLES = 11
NUM_STEPS = 4
#: Ranks that are threads share torch's generator.
SEEDING = threading.Lock()


class Model(nn.Module):
    """Parameters of every kind: shared, frozen, unused, used in some steps, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 9)
        self.same = nn.Linear(9, 9)
        self.frozen = nn.Linear(9, 9).requires_grad_(False)
        self.unused = nn.Linear(3, 2)
        self.sometimes = nn.Linear(9, 9)
        self.last = nn.Linear(9, 1)
        self.register_buffer("scale", torch.ones(()))
        self.turn = 0

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        hidden = torch.tanh(self.same(torch.tanh(self.same(torch.tanh(self.first(dense))))))
        hidden = hidden + self.frozen(hidden) * self.scale
        if self.turn % 2:
            hidden = hidden + self.sometimes(hidden)
        logits: Tensor = self.last(hidden).squeeze(1)
        return logits


def batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    dense = torch.randn(NUM_EXAMPLES, 5, generator=generator, dtype=torch.float64)
    return dense.to(dtype), (dense[:, 0] > 0).to(dtype)


def make_model(seed: int, dtype: torch.dtype) -> Model:
    with SEEDING:
        torch.manual_seed(seed)
        return Model().to(dtype)


def train(
    model: Model,
    optimizer: torch.optim.Optimizer,
    mine: slice,
    dtype: torch.dtype,
    parallel: DenseParallel | None = None,
) -> list[Any]:
    """Train. Returns the gradients of every step by parameter name; without examples there is no backward."""
    gradients = []
    for step in range(NUM_STEPS):
        model.turn = step
        dense, labels = (part[mine] for part in batch(step, dtype))
        if len(labels):
            loss = nn.functional.binary_cross_entropy_with_logits(model(dense, None), labels, reduction="sum")
            (loss / NUM_EXAMPLES).backward()  # type: ignore[no-untyped-call]
        if parallel is not None:
            assert parallel.reduce() is False, "nobody asked whether a batch is bad"
        optimizer.step()
        gradients.append(
            {name: None if p.grad is None else p.grad.clone().numpy() for name, p in model.named_parameters()}
        )
        optimizer.zero_grad(set_to_none=True)
    return gradients


def mine_of(peers: TorchPeers, empty_rank: int) -> slice:
    """A rank's examples: its part of a balanced partition; none for `empty_rank`."""
    others = [rank for rank in range(peers.world_size) if rank != empty_rank]
    if peers.rank == empty_rank:
        return slice(0, 0)
    place = others.index(peers.rank)
    return slice(NUM_EXAMPLES * place // len(others), NUM_EXAMPLES * (place + 1) // len(others))


def train_together(peers: TorchPeers, dtype: torch.dtype, empty_rank: int, sizes: list[int]) -> list[Any]:
    """For every bucket size: gradients of every step, and the final parameters."""
    ends = []
    for size in sizes:
        model = make_model(7 + peers.rank, dtype)  # all ranks start from rank 0's values
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        with DenseParallel(model, peers.dense, bucket_bytes=size) as parallel:
            gradients = train(model, optimizer, mine_of(peers, empty_rank), dtype, parallel)
        parameters = {name: value.numpy() for name, value in model.state_dict().items()}
        ends.append((gradients, parameters, len(optimizer.state)))
    return ends


@pytest.mark.parametrize(
    ("world_size", "empty_rank", "dtype"),
    [(2, -1, torch.float32), (3, 1, torch.float64), (4, -1, torch.float64), (4, 0, torch.float32)],
)
def test_sums_equal_one_process_and_do_not_depend_on_buckets(
    world_size: int, empty_rank: int, dtype: torch.dtype
) -> None:
    alone = make_model(7, dtype)
    optimizer = torch.optim.Adagrad(alone.parameters(), lr=0.1)
    expected = train(alone, optimizer, slice(None), dtype)
    ends = run_peers(world_size, train_together, dtype, empty_rank, [1, 500, 1 << 20])
    assert [end.error for end in ends] == [None] * world_size
    reference, parameters, num_states = ends[0].value[0]
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for step in range(NUM_STEPS):
        for name, gradient in expected[step].items():
            together = reference[step][name]
            assert (together is None) == (gradient is None), name
            if gradient is not None:
                assert abs(together - gradient).max() < tolerance, name
    assert num_states == len(optimizer.state), "a parameter that no rank uses gets no optimizer state"
    for end in ends:
        for gradients, values, _ in end.value:
            for step in range(NUM_STEPS):
                for name, gradient in gradients[step].items():
                    assert (gradient is None) == (reference[step][name] is None)
                    assert gradient is None or gradient.tobytes() == reference[step][name].tobytes(), name
            assert {name: value.tobytes() for name, value in values.items()} == {
                name: value.tobytes() for name, value in parameters.items()
            }


def fail_in_midst(peers: TorchPeers) -> None:
    model = make_model(1, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DenseParallel(model, peers.dense) as parallel:
        if peers.rank == 1:
            raise ValueError("one rank is broken")
        train(model, optimizer, slice(None), torch.float32, parallel)


def test_a_lost_peer_is_the_steps_error() -> None:
    ends = run_peers(2, fail_in_midst)
    assert ends[0].error == ("PeerError", "rank 1: ValueError: one rank is broken")
    assert ends[1].error == ("ValueError", "one rank is broken")


def sparse_gradient(peers: TorchPeers) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 2, sparse=True)

        def forward(self, dense: Tensor, sparse: Any) -> Tensor:
            total: Tensor = self.table(torch.arange(2)).sum()
            return total

    model = Sparse()
    with DenseParallel(model, peers.dense):
        model(torch.ones(1), None).backward()


def test_a_sparse_gradient_is_refused() -> None:
    for end in run_peers(2, sparse_gradient):
        assert end.error is not None
        assert end.error[0] == "InputError"
        assert "model parameter table.weight: expected a dense gradient" in end.error[1]


def nothing_to_train(peers: TorchPeers) -> list[float]:
    model = nn.Bilinear(1, 1, 1).requires_grad_(False)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with DenseParallel(model, peers.dense) as parallel:
        parameter.grad = torch.ones(1)
        assert [parallel.reduce(is_bad=bad) for bad in (None, False, peers.rank == 1)] == [False, False, True]
        optimizer.step()
    return [float(parameter)]


def test_a_model_without_dense_parameters() -> None:
    for end in run_peers(2, nothing_to_train):
        assert end.error is None
        assert end.value == pytest.approx([0.9])


def normalise(peers: TorchPeers) -> list[dict[str, Any]]:
    """Buffers before and after they are broadcast."""
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ends = []
    with DenseParallel(model, peers.dense) as parallel:
        dense, labels = (part[peers.rank :: 2] for part in batch(0, torch.float32))
        nn.functional.binary_cross_entropy_with_logits(model(dense), labels).backward()  # type: ignore[no-untyped-call]
        parallel.reduce()
        optimizer.step()
        for share in (lambda: None, parallel.share_buffers):
            share()
            ends.append({name: value.tolist() for name, value in model.state_dict().items()})
    return ends


def test_all_ranks_end_with_rank_0s_buffers() -> None:
    first, second = (end.value for end in run_peers(2, normalise))
    assert first[0]["1.running_mean"] != second[0]["1.running_mean"], "of each rank's own examples"
    assert first[0]["0.weight"] == second[0]["0.weight"]
    assert first[0] == first[1] == second[1]


def train_in_parts(peers: Any, declared: int) -> tuple[list[Any], int]:
    """Gradients of every step, in up to three micro-batches each, and the number of buckets sent before the step."""
    model = make_model(7, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients, early = [], 0
    with DenseParallel(model, peers.dense, bucket_bytes=1, backwards_per_step=declared) as parallel:
        for step in range(NUM_STEPS):
            model.turn = step
            # The last step is ragged: one rank has fewer micro-batches than declared.
            parts = 3 if step < NUM_STEPS - 1 or peers.rank else 1
            for part in range(parts):
                mine = slice(NUM_EXAMPLES * part // 3, NUM_EXAMPLES * (part + 1) // 3, 1)
                dense, labels = (whole[mine][peers.rank :: peers.world_size] for whole in batch(step, torch.float64))
                loss = nn.functional.binary_cross_entropy_with_logits(model(dense, None), labels, reduction="sum")
                (loss / NUM_EXAMPLES).backward()  # type: ignore[no-untyped-call]
            early += len(parallel._tickets)
            parallel.reduce()
            optimizer.step()
            gradients.append(
                {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
            )
            optimizer.zero_grad(set_to_none=True)
    return gradients, early


def test_micro_batches_are_summed_before_the_all_reduce() -> None:
    (first, early), (second, _) = (end.value for end in run_threads(2, train_in_parts, 3))
    (alone, _), *_ = (end.value for end in run_threads(1, train_in_parts, 3))
    assert early, "a bucket travels under the last backward"
    for step, gradients in enumerate(first):
        assert gradients.keys() == second[step].keys() == alone[step].keys()
        for name, gradient in gradients.items():
            assert gradient.tobytes() == second[step][name].tobytes()
            assert step == NUM_STEPS - 1 or abs(gradient - alone[step][name]).max() < 1e-12


def test_an_extra_backward_is_refused() -> None:
    ends = run_threads(2, train_in_parts, 2)
    assert JobError.__name__ in {end.error[0] for end in ends if end.error is not None}
    assert any("expected 2 backwards per step" in end.error[1] for end in ends if end.error is not None)


class _GoneGroup:
    """A lane whose peer is gone."""

    world_size = 2
    calls = 0

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        pass

    def all_to_all(self, *_: object) -> None:
        self.calls += 1
        raise PeerError(f"call {self.calls}")


def test_after_the_first_error_no_bucket_waits_for_another(no_leaks: None) -> None:
    model, group = make_model(1, torch.float32), _GoneGroup()
    with DenseParallel(model, group, bucket_bytes=1) as parallel:  # type: ignore[arg-type]
        for _ in range(2):
            with pytest.raises(PeerError, match="call 1"):
                parallel.reduce()


def train_good_batches(peers: Any, bucket_bytes: int) -> list[bool]:
    """Train steps of which rank 1 finds some bad; all ranks skip those."""
    model = make_model(3, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    left_out = []
    with DenseParallel(model, peers.dense, bucket_bytes=bucket_bytes) as parallel:
        for step in range(NUM_STEPS):
            dense, labels = batch(step, torch.float64)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            nn.functional.binary_cross_entropy_with_logits(model(dense, None), labels).backward()  # type: ignore[no-untyped-call]
            is_bad = peers.rank == 1 and step in (0, 2)
            gradient = model.last.weight.grad
            assert gradient is not None
            own = gradient.clone()
            left_out.append(parallel.reduce(is_bad=is_bad))
            assert torch.equal(gradient, own * peers.world_size), "the sums are there"
            if not left_out[-1]:
                optimizer.step()
            else:
                assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
            optimizer.zero_grad(set_to_none=True)
    return left_out


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_all_ranks_skip_the_same_step(bucket_bytes: int) -> None:
    ends = run_threads(2, train_good_batches, bucket_bytes)
    assert [end.error for end in ends] == [None, None]
    assert [end.value for end in ends] == [[True, False, True, False]] * 2
