"""One rank of the benchmark: calibrates the links, then times every case, round by round.

    python -m benchmarks.resharding.rank RANK ADDRESS PORT ROWS ROUNDS OUT

Rank 0 writes ``{"network": …, "times": [{case, way, simulated_s, measured_s: [by round]}]}``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bagpipe.cluster.network import Network
from bagpipe.distributed.links import TorchLinks
from bagpipe.distributed.membership import Membership
from bagpipe.distributed.process_groups import TorchPeers
from bagpipe.pipeline.stage.resharding import reshard
from bagpipe.schedule.resharding.plan import Resharding
from bagpipe.schedule.resharding.simulate import simulate
from benchmarks.resharding.cases import COLUMNS, NUM_RANKS, cases

#: Elements of short and long messages of the calibration, and short messages in a row.
_SHORT, _LONG, _MANY = 64, 1 << 19, 50
_REPEATS = 5


def calibrate(peers: TorchPeers, links: TorchLinks) -> Network:
    """The network as messages between two ranks show it, the same on all ranks.

    A message and its answer take twice a latency, and two messages' times in the ports; many in a row show the time of
    one message in the ports.
    """
    short_s = _round_trip(peers, links, _SHORT, 1)
    many_s = _round_trip(peers, links, _SHORT, _MANY)
    long_s = _round_trip(peers, links, _LONG, 1)
    message_s = max(0.0, (many_s - short_s) / (_MANY - 1))
    found = {
        "bandwidth_bytes_per_s": 4 * (_LONG - _SHORT) / (long_s - short_s),
        "message_s": message_s,
        "latency_s": max(0.0, short_s / 2 - message_s),
    }
    return Network(**peers.share(found))


def _round_trip(peers: TorchPeers, links: TorchLinks, elements: int, count: int) -> float:
    """Seconds of `count` messages from rank 0 to rank 1 and a short answer; median."""
    times, answer = [], torch.zeros(_SHORT)
    messages = [torch.zeros(elements) for _ in range(count)]
    for _ in range(_REPEATS + 1):
        peers.acknowledge()
        start_s = time.perf_counter()
        if peers.rank == 0:
            back = links.receive(1, 1, answer)
            for message in messages:
                links.send(1, 0, message).wait()
            back.wait()
        elif peers.rank == 1:
            for pending in [links.receive(0, 0, message) for message in messages]:
                pending.wait()
            links.send(0, 1, answer).wait()
        times.append(time.perf_counter() - start_s)
    return median(times[1:])


def measure(peers: TorchPeers, rows: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Times of all cases and ways at this rank; those of rank 0 are of the slowest rank."""
    links = peers.open_links(NUM_RANKS)
    network = calibrate(peers, links)
    tensor = torch.arange(rows * COLUMNS, dtype=torch.float32).reshape(rows, COLUMNS)
    plans = [(case, way, plan) for case in cases() for way, plan in case.ways(rows, network).items()]
    times: list[list[float]] = [[] for _ in plans]
    for turn in range(rounds + 1):  # the first one opens connections
        for number, (_, _, plan) in enumerate(plans):
            seconds = _seconds(peers, links, plan, tensor)
            if turn:
                times[number].append(seconds)
        say(f"round {turn} of {rounds}")
    end = calibrate(peers, links)
    return {
        "network": {name: getattr(network, name) for name in ("bandwidth_bytes_per_s", "message_s", "latency_s")},
        "bandwidth_at_end": end.bandwidth_bytes_per_s,
        "rows": rows,
        "times": [
            {
                "case": case.name,
                "way": way,
                "simulated_s": simulate(plan, network).makespan_s,
                "measured_s": measured,
                "messages": len(plan.messages()),
            }
            for (case, way, plan), measured in zip(plans, times, strict=True)
        ],
    }


def _seconds(peers: TorchPeers, links: TorchLinks, plan: Resharding, tensor: torch.Tensor) -> float:
    """Seconds until the last rank is done, from a common start. Checks the result."""
    rank = peers.rank
    part, expected = (
        tensor[layout.boxes(*tensor.shape)[layout.ranks.index(rank)].index] if rank in layout.ranks else None
        for layout in (plan.source, plan.target)
    )
    peers.acknowledge()
    start_s = time.perf_counter()
    found = reshard(plan, part, rank=rank, links=links, tag=2, shape=(COLUMNS,), dtype=tensor.dtype)
    seconds = time.perf_counter() - start_s
    if expected is not None and (found is None or not torch.equal(found, expected)):
        raise AssertionError(f"rank {rank}: another result than expected from {plan.source} to {plan.target}")
    return float(max(peers.gather(seconds)))


def main(arguments: list[str]) -> None:
    """Run one rank."""
    rank, port, rows, rounds = (int(arguments[n]) for n in (0, 2, 3, 4))
    torch.set_num_threads(1)
    membership = Membership(rank=rank, world_size=NUM_RANKS, address=arguments[1], port=port, store_is_launchers=True)
    with TorchPeers(membership, timeout_s=60) as peers:
        found = measure(peers, rows, rounds, lambda line: print(line, flush=True) if rank == 0 else None)
    if rank == 0:
        Path(arguments[5]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
