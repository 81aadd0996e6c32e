"""Ranks in real processes: runs a test's function once per rank and returns the results.

    run_ranks(n, work)  work(membership)     run_peers(n, work)  work(peers), inside `TorchPeers`

The processes are forked from a server that has torch imported. The job's TCPStore lives in the test, as in a launcher.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from bagpipe.distributed.membership import Membership
from bagpipe.distributed.process_groups import TorchPeers
from tests.system.forked import CONTEXT
from tests.system.forked_child import fork_cachers

__all__ = ["DEADLINE_S", "LONG_DEADLINE_S", "Ended", "run_peers", "run_ranks"]

#: Deadlines of one collective: where a peer stays silent, and where none should. No test can wait for the long one: its
#: ranks are killed before, and it fails.
DEADLINE_S, LONG_DEADLINE_S = 3.0, 300.0
_PATIENCE_S = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Outcome of one rank.

    Attributes:
        value: returned by its function; None if it raised.
        error: class name and message of its exception.
        threads: of its process, afterwards.
        code: exit code of its process, negative for a signal.
    """

    value: Any = None
    error: tuple[str, str] | None = None
    threads: int = 0
    code: int | None = None


def run_peers(world_size: int, work: Callable[..., Any], *args: object, hosted_by_rank_0: bool = False) -> list[Ended]:
    """Run ``work(peers, *args)`` on every rank, inside ``with TorchPeers``; see `run_ranks`."""
    return run_ranks(world_size, _in_peers, work, args, hosted_by_rank_0=hosted_by_rank_0)


def _in_peers(membership: Membership, work: Callable[..., Any], args: tuple[object, ...]) -> Any:
    with TorchPeers(membership, timeout_s=LONG_DEADLINE_S) as peers:
        return work(peers, *args)


def run_ranks(
    world_size: int, work: Callable[..., Any], *args: object, hosted_by_rank_0: bool = False, stopped: int = -1
) -> list[Ended]:
    """Run ``work(membership, *args)`` on every rank. Returns the outcomes by rank. A rank that hangs is killed.

    Args:
        world_size: number of processes.
        work: a module-level function.
        args: its further arguments.
        hosted_by_rank_0: rank 0 hosts the TCPStore, as without torchrun.
        stopped: a rank that stops itself and reports nothing; it is killed when the others have ended.
    """
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    port = store.port
    if hosted_by_rank_0:
        del store  # frees its port
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
    processes = []
    for rank in range(world_size):
        membership = Membership(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            port=port,
            store_is_launchers=not hosted_by_rank_0,
        )
        processes.append(CONTEXT.Process(target=_main, args=(pipes[rank][1], membership, work, args)))
    for process in processes:
        process.start()
    for _, child in pipes:
        child.close()
    ended = _collect([pipe for pipe, _ in pipes], stopped)
    for process, end in zip(processes, ended, strict=True):
        if end is None:
            process.kill()  # a stopped rank never reports
        process.join(_PATIENCE_S)
    return [end or Ended(code=process.exitcode) for end, process in zip(ended, processes, strict=True)]


def _collect(pipes: list[Connection], stopped: int) -> list[Ended | None]:
    """Collect the outcomes that the ranks report."""
    ended: dict[Connection, Ended | None] = {pipe: None for rank, pipe in enumerate(pipes) if rank == stopped}
    while silent := [pipe for pipe in pipes if pipe not in ended]:
        ready = wait(silent, _PATIENCE_S)
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                ended[pipe] = pipe.recv()
            except EOFError:
                ended[pipe] = None
    return [ended.get(pipe) for pipe in pipes]


def _main(pipe: Connection, membership: Membership, work: Callable[..., Any], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fork_cachers()
    value, error = None, None
    try:
        value = work(membership, *args)
    except (Exception, SystemExit) as raised:
        error = type(raised).__name__, str(raised)
    threads = len(os.listdir("/proc/self/task"))
    pipe.send(Ended(value=value, error=error, threads=threads, code=0))
