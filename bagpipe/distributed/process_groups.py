"""`TorchPeers`: the other ranks over torch.distributed. One process group per lane, so lanes never wait for each other.

    key-value store (the launcher's, or rank 0's) ─ prefix "bagpipe/attempt_<n>" ─> rendezvous, heartbeats, failures
        a process's second job has the prefix "bagpipe/attempt_<n>/job_1", and so on
    pull, push, dense    rows and gradients   gloo on a CPU, nccl on a CUDA device
    ack, agree, scores   numbers              gloo
    plans                ids and plans        gloo; used only where ranks bring their own batches
    evaluation …         the same             opened with the first evaluation beside a training that rests
    links, sums, steps   pipeline stages; opened only for a pipeline

The prefix separates restarts: in torchrun's own store, torch.distributed uses the same keys for every attempt, so a new
rank could read the address of a dead one. Deadlines detect hangs in an exchange; `bagpipe.distributed.failure` detects
dead ranks. Control messages between phases have no timeout; heartbeats detect dead peers.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from bagpipe.distributed.collectives import LaneGroup
from bagpipe.distributed.control_channel import ControlChannel
from bagpipe.distributed.evaluation_peers import EvaluationPeers
from bagpipe.distributed.failure import GRACE_S, STORE_ERRORS, Failure, Failures, Watcher
from bagpipe.distributed.interface import ExchangeLane, StepVote
from bagpipe.distributed.keystore import KeyStore, connect
from bagpipe.distributed.links import TorchLinks
from bagpipe.distributed.membership import Membership, interface_of, local_address
from bagpipe.errors import InputError, JobError, PeerError, StoreError

__all__ = ["TorchPeers"]

#: Largest difference in start time between ranks: imports on a cold file system, a busy machine.
START_TIMEOUT_S = 60.0
#: Deadline of a response of the job's key-value store. It takes a millisecond, unless the store's host is gone.
STORE_TIMEOUT_S = 10.0
#: Numbers of the jobs of this process: one after the other, each with keys of its own.
_jobs = itertools.count()
_DEVICE_LANES = ("pull", "push", "dense")
_HOST_LANES = ("ack", "agree", "scores", "plans")


class TorchPeers:
    """`Peers` over torch.distributed. Use it as a context manager around all other resources.

    It also initializes the default process group, which a user's model can use in its forward. One that the program has
    initialized already is used, and left as it is.

    Args:
        membership: this rank.
        timeout_s: deadline of one exchange; also an attribute.
        device: device of the exchanged rows and gradients.

    Raises:
        PeerError: on entering: the ranks cannot reach each other.
        InputError: on entering: the program's own default process group has other ranks.
        InputError, PeerError, SystemExit: on entering: another rank failed before.
    """

    def __init__(self, membership: Membership, *, timeout_s: float, device: torch.device | str = "cpu") -> None:
        self.rank = membership.rank
        self.world_size = membership.world_size
        self.timeout_s = timeout_s
        self._membership = membership
        self._device = torch.device(device)
        self._lanes: dict[str, LaneGroup] = {}
        self._groups: list[dist.ProcessGroup] = []
        self._evaluation: EvaluationPeers | None = None
        self._failures: Failures | None = None
        self._control: ControlChannel | None = None
        self._on_failure: Callable[[BaseException], None] | None = None
        self._end: BaseException | None = None
        self._ending = threading.Lock()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._check_default_group()
        with ExitStack() as stack:
            try:
                self._failures = failures = self._rendezvous(stack)
            except (RuntimeError, ValueError) as error:
                raise PeerError(self._rendezvous_error(error)) from None
            self._open_lanes()
            stack.enter_context(Watcher(failures, self._failed, self._find_hang))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Report an error to the other ranks, then release everything.

        Raises:
            InputError, PeerError, SystemExit: another rank failed first. Its error replaces this rank's own, which is a
                consequence of it.
        """
        end = self.report(error) if error is not None else None
        if error is not None:
            self._abort()  # a hanging device exchange blocks the destruction of its group
        with self._stack:
            self._lanes = {}
        self._failures = self._control = self._evaluation = None
        if end is not error and end is not None:
            raise end from None

    def listen(self, on_failure: Callable[[BaseException], None]) -> None:
        """Call `on_failure` with the error for this rank when another rank fails. Runs in the watcher's thread."""
        self._on_failure = on_failure
        known = self._failures.known if self._failures is not None else None
        if known is not None:
            on_failure(known.error())

    def report(self, error: BaseException) -> BaseException:
        """Report to the other ranks that this one ends with `error`. Call it before releasing resources they can use.

        Returns:
            The error this rank should end with: another rank's error if that came first, or if that rank's death
            caused this error. Only the first call counts.
        """
        failures = self._failures
        with self._ending:
            if failures is not None and self._end is None:
                own = error
                if isinstance(error, (StoreError, JobError)) and not isinstance(error, PeerError):
                    # A dead rank could have hosted the store or the cacher.
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

    def agree(self, vote: StepVote) -> StepVote:
        return StepVote(self._lanes["agree"].maximum(vote))

    def acknowledge(self) -> None:
        self._lanes["ack"].maximum(0)

    def gather(self, value: Any) -> list[Any]:
        return self._control_channel.gather(value)

    def share(self, value: Any) -> Any:
        """Broadcast rank 0's JSON-able value; returns it on every rank. No deadline, as `gather`.

        Raises:
            PeerError: as `gather`.
        """
        return self._control_channel.share(value)

    def collect(self, values: Tensor) -> list[Tensor]:
        """Gather the ranks' 1-D tensors at rank 0, ordered by rank; [] elsewhere. For the main thread, between phases.

        Args:
            values: on the host; one dtype on all ranks, any length.

        Raises:
            PeerError: as `exchange`.
        """
        return self._lanes["scores"].collect(values)

    @property
    def _control_channel(self) -> ControlChannel:
        assert self._control is not None, "inside the with block"
        return self._control

    @property
    def dense(self) -> LaneGroup:
        """The lane of the dense gradients (`bagpipe.dense.parallel.replicated`)."""
        return self._lanes["dense"]

    @property
    def plans(self) -> LaneGroup:
        """The lane of the ids and plans of batches that the ranks bring (`bagpipe.lookahead.ranked`)."""
        return self._lanes["plans"]

    def evaluation(self) -> EvaluationPeers:
        """The same ranks for evaluations beside a training that rests. All ranks call it, between phases.

        Raises:
            PeerError: the ranks cannot reach each other.
        """
        if self._evaluation is None:
            self._evaluation = EvaluationPeers(self, self._open_evaluation_lane)
        return self._evaluation

    def open_links(self, num_processes: int) -> TorchLinks:
        """Connect the processes of each replica. All ranks call it once, between phases.

        Args:
            num_processes: processes per replica; divides the world size. Replicas are consecutive ranks.

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

    def open_stage_groups(
        self, holders: Collection[Sequence[int]], purpose: str = "sums"
    ) -> dict[tuple[int, ...], LaneGroup]:
        """Connect the ranks that hold the same stages. All ranks call it with equal arguments, between phases.

        Args:
            holders: sets of ranks. Duplicates and sets of one rank are ignored.
            purpose: names the communicators, which are other ones for every call.

        Returns:
            This rank's groups, keyed by their ranks in ascending order.

        Raises:
            PeerError: the ranks cannot reach each other.
        """
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        wanted = sorted({tuple(sorted(set(ranks))) for ranks in holders})
        groups = {}
        for ranks in wanted:
            lane = self._open_lane(f"{purpose} {','.join(map(str, ranks))}", backend, ranks) if len(ranks) > 1 else None
            if lane is not None:
                groups[ranks] = lane
        return groups

    def _rendezvous(self, stack: ExitStack) -> Failures:
        """Connect to the store, then to every other rank. `stack` receives the cleanup."""
        membership = self._membership
        hosts_store = membership.rank == 0 and not membership.store_is_launchers
        start_s = max(START_TIMEOUT_S, self.timeout_s)
        job = next(_jobs)
        store = connect(membership, is_master=hosts_store, timeout_s=start_s, job=job)
        client = connect(membership, is_master=False, timeout_s=start_s, job=job)
        own = stack.enter_context(KeyStore(client, min(self.timeout_s, STORE_TIMEOUT_S)))
        failures = Failures(own, membership.rank, membership.world_size)
        self._control = ControlChannel(
            own, failures, rank=membership.rank, world_size=membership.world_size, silence_s=self.timeout_s
        )
        if hosts_store:
            stack.callback(failures.await_leavers, 2 * GRACE_S)
        failures.heartbeat()
        is_users = dist.is_initialized()
        stack.callback(self._destroy_groups, with_default=not is_users)
        stack.callback(failures.leave)
        failures.await_arrivals(start_s)
        if is_users:
            return failures
        with _interface_settings(membership):
            dist.init_process_group(
                "gloo",
                store=store,
                rank=membership.rank,
                world_size=membership.world_size,
                timeout=timedelta(seconds=start_s),
            )
        return failures

    def _check_default_group(self) -> None:
        """Check the default process group of the program, if it has one."""
        if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (self.rank, self.world_size):
            raise InputError(
                f"expected a default process group of the job's ranks, got rank {dist.get_rank()} of "
                f"{dist.get_world_size()} where RANK and WORLD_SIZE say {self.rank} of {self.world_size}"
            )

    def _open_evaluation_lane(self, name: str, is_on_device: bool) -> LaneGroup:
        backend = "nccl" if is_on_device and self._device.type == "cuda" else "gloo"
        lane = self._open_lane(name, backend, range(self.world_size))
        assert lane is not None, "of all ranks"
        return lane

    def _open_lanes(self) -> None:
        backends = dict.fromkeys(_DEVICE_LANES, "nccl" if self._device.type == "cuda" else "gloo")
        backends |= dict.fromkeys(_HOST_LANES, "gloo")
        if self._device.type == "cuda":
            # Otherwise nccl's watchdog kills the process at a deadline, with a stack trace instead of an error.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        for name, backend in backends.items():
            self._open_lane(name, backend, range(self.world_size))

    def _open_lane(self, name: str, backend: str, ranks: Sequence[int]) -> LaneGroup | None:
        """Create a lane over ascending `ranks`. All ranks call it; None if this one is not a member."""
        assert self._failures is not None, "inside the with block"
        timeout = timedelta(seconds=self.timeout_s)
        with _interface_settings(self._membership):
            try:
                group = dist.new_group(list(ranks), backend=backend, timeout=timeout)
            except (RuntimeError, ValueError) as error:
                raise PeerError(self._rendezvous_error(error)) from None
        if self.rank not in ranks:
            return None
        assert isinstance(group, dist.ProcessGroup)
        self._groups.append(group)
        self._lanes[name] = LaneGroup(
            name=name, group=group, ranks=ranks, rank=self.rank, timeout_s=self.timeout_s, failures=self._failures
        )
        return self._lanes[name]

    def _rendezvous_error(self, error: Exception) -> str:
        membership = self._membership
        line = (str(error).splitlines() or [type(error).__name__])[0]
        return (
            f"rank {membership.rank} of {membership.world_size} cannot reach the others through "
            f"{membership.address}:{membership.port} (MASTER_ADDR, MASTER_PORT; GLOO_SOCKET_IFNAME names the network "
            f"interface to use): {line}"
        )

    def _failed(self, error: BaseException) -> None:
        """Handle the failure of another rank or a device hang. Runs in the watcher's thread."""
        self.report(error)
        if self._on_failure is not None:
            self._on_failure(error)
        self._abort()

    def _destroy_groups(self, *, with_default: bool) -> None:
        """Destroy the groups, with live or dead ranks. Closed connections end pending exchanges."""
        groups: list[dist.ProcessGroup | None] = [None] if with_default else [*self._groups]
        self._groups = []
        for group in groups:
            with suppress(*STORE_ERRORS):  # the communicator is already broken
                if dist.is_initialized():
                    dist.destroy_process_group(group)

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
def _interface_settings(membership: Membership) -> Iterator[None]:
    """Make gloo and nccl use the network interface that routes to MASTER_ADDR, unless the user names one.

    Their default is the address of the host's own name, which other hosts often cannot reach in containers and network
    namespaces.
    """
    address = local_address(membership.address, membership.port)
    is_loopback = address is not None and address.startswith("127.")
    name = interface_of(address) if address is not None else None
    if name is None or (is_loopback and membership.local_world_size < membership.world_size):
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
