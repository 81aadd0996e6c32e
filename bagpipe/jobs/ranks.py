"""`Ranks`: collectives of a job's ranks. Single-rank collectives are no-ops.

open_ranks ─> TorchPeers or None ─> gather, share, collect ─> check_same: the error names the rank that differs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.client.agreement import first_difference
from bagpipe.distributed.launcher import following_launcher
from bagpipe.distributed.membership import Membership
from bagpipe.distributed.process_groups import TorchPeers
from bagpipe.errors import InputError
from bagpipe.util.redaction import redact

__all__ = ["Ranks", "check_same", "open_ranks", "state_shapes"]


class Ranks:
    """All ranks of a job. The main thread of every rank makes the same calls in the same order.

    Args:
        peers: the other ranks, entered; None for a single rank.
        membership: this rank; None for a single rank.
    """

    def __init__(self, peers: TorchPeers | None = None, membership: Membership | None = None) -> None:
        self.peers = peers
        self.membership = membership
        self.rank = membership.rank if membership is not None else 0
        self.world_size = membership.world_size if membership is not None else 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which starts services, prints and writes results."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON-able value, by rank."""
        return [value] if self.peers is None else self.peers.gather(value)

    def share(self, value: Any) -> Any:
        """Rank 0's JSON-able value, on every rank. No timeout."""
        return value if self.peers is None else self.peers.share(value)

    def collect(self, values: Tensor) -> Tensor:
        """Concatenation of all ranks' 1-D host tensors on rank 0; empty on other ranks."""
        if self.peers is None:
            return values
        return torch.cat([values.new_empty(0), *self.peers.collect(values)])

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an error that leaves the block to the other ranks, before any cleanup."""
        try:
            yield
        except BaseException as error:
            if self.peers is not None:
                self.peers.report(error)
            raise

    def listen(self, on_failure: Callable[[BaseException], None]) -> None:
        """Call `on_failure` from another thread when another rank fails."""
        if self.peers is not None:
            self.peers.listen(on_failure)


@contextmanager
def open_ranks(membership: Membership | None, *, timeout_s: float, device: str) -> Iterator[Ranks]:
    """Rendezvous with the other ranks. An error that leaves the block is reported to them first.

    Raises:
        PeerError: a rank cannot be reached.
        InputError, PeerError, SystemExit: another rank failed first.
    """
    if torch.device(device).index is not None:
        # The main thread's device; lanes set theirs with their streams. The default would also initialise device 0.
        torch.cuda.set_device(device)
    if membership is None:
        yield Ranks()
        return
    with ExitStack() as stack:
        with following_launcher():
            peers = stack.enter_context(TorchPeers(membership, timeout_s=timeout_s, device=device))
        yield Ranks(peers, membership)


def check_same(ranks: Ranks, values: Mapping[str, Any], what: str) -> None:
    """Check that all ranks have equal values.

    Args:
        ranks: the ranks.
        values: values of this rank, by name; JSON-able.
        what: what the values are, for the message.

    Raises:
        InputError: values differ. The same error on every rank, with the name, both values and both ranks.
    """
    gathered = ranks.gather(dict(values))
    for rank, other in enumerate(gathered[1:], start=1):
        difference = first_difference(gathered[0], other)
        if difference is not None:
            # The URL of a store can contain a password.
            first, second = redact(str(difference.first)), redact(str(difference.second))
            raise InputError(
                f"the ranks' {what} differ: {difference.path} is {first} on rank 0 and {second} on rank {rank}"
            )


def state_shapes(model: nn.Module) -> dict[str, Any]:
    """Dtypes and shapes of a model's tensors, by name; for `check_same`: gradient sums need equal ones on all ranks."""
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return {name: [str(value.dtype).removeprefix("torch."), *value.shape] for name, value in tensors.items()}
