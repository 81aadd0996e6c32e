"""`python -m tests.harness.soak`: a table of trends; exit code 1 if any quantity grows."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bagpipe.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, InputError, JobError
from bagpipe.util.program import run_program
from tests.harness.chaos.jobs import ChaosJob
from tests.harness.chaos.run import PRELOADED
from tests.harness.chaos.scene import Scene, Start
from tests.harness.soak.sampling import folder_bytes, process_values, store_values
from tests.harness.soak.trends import Sample, Trend, trends_of
from tests.harness.verdicts import write_json
from tests.harness.zygote import Zygote

__all__ = ["main"]

#: A checkpoint every second or two, and a cache that evicts all the time.
_EVERY = 200
_FLAGS = ("--data.epochs", "1000000", "--cache.rows", "900", "--optim.rows", "adam", "--optim.dense", "adam")
_STOP_TIMEOUT_S = 60.0
_UNITS = {"rss_bytes": 2**20, "used_bytes": 2**20}


def main() -> None:
    """Run the program and exit with its code."""
    sys.exit(run_program(_soak))


def _soak(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long (default: %(default)s)")
    parser.add_argument("--interval", type=float, default=10.0, help="between samples, s (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="of the job (default: %(default)s)")
    parser.add_argument("--json", default="", metavar="FILE", help="write all samples and trends here")
    options = parser.parse_args(argv)
    warm_up_s = min(0.2 * options.seconds, 600.0)
    if options.interval <= 0 or options.ranks < 1 or options.seconds - warm_up_s < 2 * options.interval:
        raise InputError(f"expected at least one rank and a few intervals of {options.interval:g} s, got {argv}")
    job = ChaosJob(name="soak", world_size=options.ranks, flags=_FLAGS)
    with tempfile.TemporaryDirectory(prefix="bagpipe-soak-") as folder, Zygote(PRELOADED, Path.cwd()) as zygote:
        with Scene(job, zygote, Path(folder), durable=False, every=_EVERY, full_every=4) as scene:
            start = scene.start()
            samples = list(_samples(scene, start, options.seconds, options.interval))
            steps = _stop(scene, start)
    trends = trends_of(samples, warm_up_s)
    _show(trends, steps, options.seconds)
    write_json(options.json, {"steps": steps, "samples": samples, "trends": trends})
    return EXIT_DONE if all(trend.is_flat for trend in trends) else EXIT_FAILED


def _samples(scene: Scene, start: Start, seconds: float, interval_s: float) -> Iterator[Sample]:
    begin_s = time.monotonic()
    pids = {f"trainer-{rank}": item.pid for rank, item in enumerate(start.ranks)}
    pids |= {"daemon": scene.daemon.process_id, "store": scene.store.process_id}
    next_s = begin_s + interval_s
    while next_s <= begin_s + seconds + interval_s / 2:
        while (wait_s := next_s - time.monotonic()) > 0:
            if any(item.has_ended() for item in start.ranks):
                lines = [line for item in start.ranks for line in item.error_lines()[-1:]]
                raise JobError(f"the job ended after {time.monotonic() - begin_s:.0f} s: {' | '.join(lines)}")
            start.has_ended(wait_s)
        at_s = time.monotonic() - begin_s
        for owner, pid in pids.items():
            values = process_values(pid)
            if owner == "store":
                values |= store_values(scene.store.client)
            yield Sample(at_s=at_s, owner=owner, values=values)
        yield Sample(at_s=at_s, owner="checkpoints", values={"used_bytes": folder_bytes(scene.checkpoints)})
        next_s += interval_s


def _stop(scene: Scene, start: Start) -> int:
    """Stop the job cleanly. Returns the number of steps it has trained."""
    start.signal(signal.SIGTERM)
    deadline_s = time.monotonic() + _STOP_TIMEOUT_S
    while not start.has_ended(1.0) and time.monotonic() < deadline_s:
        pass
    scene.finish(start)
    codes = [item.code for item in start.ranks]
    if codes != [EXIT_INTERRUPTED] * len(codes):
        lines = [line for item in start.ranks for line in item.error_lines()[-1:]]
        raise JobError(f"the job did not stop as asked: codes {codes}, {' | '.join(lines)}")
    return int(json.loads(start.result.read_text())["steps"])


def _show(trends: Sequence[Trend], steps: int, seconds: float) -> None:
    print(f"{steps} steps in {seconds:.0f} s")
    print(f"{'':14}{'':12}{'first':>10}{'last':>10}{'most':>10}{'growth':>10}")
    for trend in trends:
        unit = _UNITS.get(trend.quantity, 1)
        numbers = "".join(f"{value / unit:10.2f}" for value in (trend.first, trend.last, trend.most, trend.growth))
        words = "MiB" if unit > 1 else ""
        print(f"{trend.owner:14}{trend.quantity:12}{numbers} {words:4}{'flat' if trend.is_flat else 'GROWS'}")
