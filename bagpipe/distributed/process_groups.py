"""`TorchPeers`: the other ranks over torch.distributed. One process group per lane, so that none waits for another's.

    key-value store (the launcher's, or rank 0's) ─ prefix "bagpipe/attempt_<n>" ─> rendezvous, beats, failures
    pull, push, dense    rows and gradients   gloo on a CPU, nccl on a CUDA device
    ack, agree, scores   numbers              gloo
    links, sums          of the stages of a pipeline; opened if there is one

The prefix is what makes a restarted job work: with torchrun's own store, torch.distributed gives every attempt the same
keys, and a new rank may read the address of a dead one. Ends are told apart from hangs by a deadline on every exchange
and by `bagpipe.distributed.failure`. Control messages between phases have no timeout; heartbeats detect dead peers.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from bagpipe.distributed.control_channel import ControlChannel
from bagpipe.distributed.failure import GRACE_S, STORE_ERRORS, Failure, Failures, Watcher
from bagpipe.distributed.interface import ExchangeLane, StepVote
from bagpipe.distributed.keystore import KeyStore
from bagpipe.distributed.lane_group import LaneGroup
from bagpipe.distributed.links import TorchLinks
from bagpipe.distributed.membership import Membership, interface_of, local_address
from bagpipe.errors import JobError, PeerError, StoreError

__all__ = ["TorchPeers"]

#: How long ranks may differ in starting: imports on a cold file system, a busy machine.
START_TIMEOUT_S = 60.0
#: How long the job's key-value store may take to answer; it takes a millisecond, unless its host is gone.
STORE_TIMEOUT_S = 10.0
_DEVICE_LANES = ("pull", "push", "dense")
_HOST_LANES = ("ack", "agree", "scores")


class TorchPeers:
    """`Peers` over torch.distributed. Use it as a context manager around all other resources.

    It sets up the default process group too, which a user's model may use in its own forward.

    Args:
        membership: which rank this is.
        timeout_s: deadline of one exchange; an attribute too.
        device: of the rows and gradients that are exchanged.

    Raises:
        PeerError: on entering, the ranks cannot reach each other.
    """

    def __init__(self, membership: Membership, *, timeout_s: float, device: torch.device | str = "cpu") -> None:
        self.rank = membership.rank
        self.world_size = membership.world_size
        self.timeout_s = timeout_s
        self._membership = membership
        self._device = torch.device(device)
        self._lanes: dict[str, LaneGroup] = {}
        self._failures: Failures | None = None
        self._words: ControlChannel | None = None
        self._on_failure: Callable[[BaseException], None] | None = None
        self._end: BaseException | None = None
        self._ending = threading.Lock()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            try:
                self._failures = failures = self._meet(stack)
            except (RuntimeError, ValueError) as error:
                raise PeerError(self._cannot_meet(error)) from None
            self._open_lanes()
            stack.enter_context(Watcher(failures, self._failed, self._find_hang))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell the others of an error first, then take everything down.

        Raises:
            InputError, PeerError, SystemExit: another rank failed first; its error instead of this rank's own, which is
                its consequence.
        """
        end = self.report(error) if error is not None else None
        if error is not None:
            self._abort()  # a device exchange that hangs would keep its group from being destroyed
        with self._stack:
            self._lanes = {}
        self._failures = self._words = None
        if end is not error and end is not None:
            raise end from None

    def listen(self, on_failure: Callable[[BaseException], None]) -> None:
        """Call `on_failure` with this rank's error when another rank fails; from a thread of this object's own."""
        self._on_failure = on_failure
        known = self._failures.known if self._failures is not None else None
        if known is not None:
            on_failure(known.error())

    def report(self, error: BaseException) -> BaseException:
        """Tell the other ranks that this one ends with `error`. Call it before giving up what they may be using.

        Returns:
            What this rank should end with: another rank's error if that came first, or if that rank's death explains
            this error. Only the first call's counts.
        """
        failures = self._failures
        with self._ending:
            if failures is not None and self._end is None:
                own = error
                if isinstance(error, (StoreError, JobError)) and not isinstance(error, PeerError):
                    # A store or a cacher that a dead rank had started?
                    error = failures.explain(" ".join(str(error).split())) or error
                failures.report(error)
                known = failures.known
                if known is None:
                    self._end = error
                else:
                    self._end = own if known.is_same(Failure.of(self.rank, own)) else known.error()
            end = self._end or error
        for lane in list(self._lanes.values()):
            lane.end_transfers()
        return end

    def exchange(
        self,
        lane: ExchangeLane,
        output: Tensor,
        input: Tensor,
        output_rows: Sequence[int],
        input_rows: Sequence[int],
    ) -> None:
        self._lanes[lane].all_to_all(output, input, output_rows, input_rows)

    def agree(self, wish: StepVote) -> StepVote:
        return StepVote(self._lanes["agree"].maximum(wish))

    def acknowledge(self) -> None:
        self._lanes["ack"].maximum(0)

    def gather(self, value: Any) -> list[Any]:
        return self._spoken.gather(value)

    def share(self, value: Any) -> Any:
        """Rank 0's JSON-able value, at every rank. Without a deadline, as long as rank 0 is alive. As `gather`.

        Raises:
            PeerError: as `gather`.
        """
        return self._spoken.share(value)

    def collect(self, values: Tensor) -> list[Tensor]:
        """Every rank's 1-D tensor, by rank, at rank 0; nothing at the others. For the main thread, between phases.

        Args:
            values: on the host; of one dtype on all ranks, of any length.

        Raises:
            PeerError: as `exchange`.
        """
        return self._lanes["scores"].collect(values)

    @property
    def _spoken(self) -> ControlChannel:
        assert self._words is not None, "inside the with block"
        return self._words

    @property
    def dense(self) -> LaneGroup:
        """The lane of the dense gradients (`bagpipe.dense.parallel.replicated`)."""
        return self._lanes["dense"]

    def open_links(self, num_processes: int) -> TorchLinks:
        """Connect the processes of each replica; by all ranks, between phases, once.

        Args:
            num_processes: of a replica: ranks 0 up to this are the first one, and so on. Divides the world size.

        Raises:
            PeerError: the ranks cannot reach each other.
        """
        first = self.rank - self.rank % num_processes
        outward, inward = {}, {}
        if self._device.type != "cuda":
            up, down = (self._open_lane(f"links {way}", "gloo", range(self.world_size)) for way in ("up", "down"))
            assert up is not None
            assert down is not None
            for other in range(num_processes):
                if first + other != self.rank:
                    is_above = first + other > self.rank
                    outward[other] = (up if is_above else down, first + other)
                    inward[other] = (down if is_above else up, first + other)
            return TorchLinks(outward, inward)
        for sender, receiver in itertools.permutations(range(self.world_size), 2):
            if sender // num_processes == receiver // num_processes:
                lane = self._open_lane(f"link {sender} to {receiver}", "nccl", sorted((sender, receiver)))
                if lane is not None and sender == self.rank:
                    outward[receiver - first] = (lane, 1 - lane.rank)
                elif lane is not None:
                    inward[sender - first] = (lane, 1 - lane.rank)
        return TorchLinks(outward, inward)

    def open_stage_groups(self, holders: Collection[Sequence[int]]) -> dict[tuple[int, ...], LaneGroup]:
        """Connect the ranks that hold the same stages; by all ranks alike, between phases, once.

        Args:
            holders: sets of ranks; equal ones, and those of one rank, are no matter.

        Returns:
            The groups that this rank is part of, by their ranks, ascending.

        Raises:
            PeerError: the ranks cannot reach each other.
        """
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        wanted = sorted({tuple(sorted(set(ranks))) for ranks in holders})
        groups = {}
        for ranks in wanted:
            lane = self._open_lane(f"sums {','.join(map(str, ranks))}", backend, ranks) if len(ranks) > 1 else None
            if lane is not None:
                groups[ranks] = lane
        return groups

    def _meet(self, stack: ExitStack) -> Failures:
        """Reach the store, then every other rank. What is entered into `stack` is taken down in reverse."""
        place = self._membership
        hosts_store = place.rank == 0 and not place.store_is_launchers
        start = timedelta(seconds=max(START_TIMEOUT_S, self.timeout_s))
        prefix = f"bagpipe/attempt_{place.attempt}"

        def connect(is_master: bool) -> PrefixStore:
            store = TCPStore(
                place.address, place.port, place.world_size, is_master, start, multi_tenant=True, wait_for_workers=False
            )
            return PrefixStore(prefix, store)

        store = connect(hosts_store)
        own = stack.enter_context(KeyStore(connect(False), min(self.timeout_s, STORE_TIMEOUT_S)))
        failures = Failures(own, place.rank, place.world_size)
        self._words = ControlChannel(
            own, failures, rank=place.rank, world_size=place.world_size, silence_s=self.timeout_s
        )
        if hosts_store:
            stack.callback(failures.await_leavers, 2 * GRACE_S)
        failures.beat()
        stack.callback(_take_down)
        stack.callback(failures.leave)
        with _interface_settings(place):
            dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size, timeout=start)
        return failures

    def _open_lanes(self) -> None:
        backends = dict.fromkeys(_DEVICE_LANES, "nccl" if self._device.type == "cuda" else "gloo")
        backends |= dict.fromkeys(_HOST_LANES, "gloo")
        if self._device.type == "cuda":
            # Without this nccl's own watchdog ends the process at a deadline, with a trace instead of an error.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        for name, backend in backends.items():
            self._open_lane(name, backend, range(self.world_size))

    def _open_lane(self, name: str, backend: str, ranks: Sequence[int]) -> LaneGroup | None:
        """Called by all ranks, alike; None if this one is not among `ranks`, which ascend."""
        assert self._failures is not None, "inside the with block"
        timeout = timedelta(seconds=self.timeout_s)
        with _interface_settings(self._membership):
            try:
                group = dist.new_group(list(ranks), backend=backend, timeout=timeout)
            except (RuntimeError, ValueError) as error:
                raise PeerError(self._cannot_meet(error)) from None
        if self.rank not in ranks:
            return None
        assert isinstance(group, dist.ProcessGroup)
        self._lanes[name] = LaneGroup(
            name=name, group=group, ranks=ranks, rank=self.rank, timeout_s=self.timeout_s, failures=self._failures
        )
        return self._lanes[name]

    def _cannot_meet(self, error: Exception) -> str:
        place = self._membership
        line = (str(error).splitlines() or [type(error).__name__])[0]
        return (
            f"rank {place.rank} of {place.world_size} cannot reach the others through {place.address}:{place.port} "
            f"(MASTER_ADDR, MASTER_PORT; GLOO_SOCKET_IFNAME names the network interface to use): {line}"
        )

    def _failed(self, error: BaseException) -> None:
        """In the watcher's thread: another rank has failed, or a device hangs."""
        self.report(error)
        if self._on_failure is not None:
            self._on_failure(error)
        self._abort()

    def _abort(self) -> None:
        for lane in list(self._lanes.values()):
            lane.abort()

    def _find_hang(self) -> BaseException | None:
        for lane in list(self._lanes.values()):
            error = lane.find_hang()
            if error is not None:
                return error
        return None


@contextmanager
def _interface_settings(place: Membership) -> Iterator[None]:
    """Have gloo and nccl use the network interface on which MASTER_ADDR is reached, unless the user names one.

    Left alone they take the address that the host's own name resolves to, which in containers and namespaces is often
    one that other hosts cannot reach.
    """
    address = local_address(place.address, place.port)
    is_loopback = address is not None and address.startswith("127.")
    name = interface_of(address) if address is not None else None
    if name is None or (is_loopback and place.local_world_size < place.world_size):
        yield
        return
    added = [key for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if key not in os.environ]
    try:
        for key in added:
            os.environ[key] = name
        yield
    finally:
        for key in added:
            del os.environ[key]


def _take_down() -> None:
    """Every group, whether its ranks are alive or not: pending exchanges end by the closed connections."""
    if dist.is_initialized():
        try:
            dist.destroy_process_group()
        except STORE_ERRORS:  # a communicator that is broken already
            return
